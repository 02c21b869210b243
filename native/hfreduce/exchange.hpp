// Runs a program over a transport on real memory: the leg of a collective between hosts.
//
// Thread contract: one thread at a time. No clock, no waiting: the caller pumps with advance() and
// sleeps in Transport::wait() when nothing moved.
//
// Chunks are sent from and received into the buffer itself; what is to be added arrives in scratch,
// at most Limits::receives chunks a peer ahead. With a wire codec a value is encoded once where it
// is made and then forwarded byte for byte; its maker decodes its own encoding too, so that all
// members end with the same bits.
//
// The first bytes to every member that something is sent to are the caller's header. What a member
// sends is taken only when its header has been found to agree, since else not even its length is
// known; no round trip is waited for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "hfreduce/program.hpp"
#include "hfreduce/transport.hpp"
#include "simd/codec.hpp"
#include "simd/kernels.hpp"

namespace ff::hfreduce {

// Buffers of one chunk, kept from call to call. Used by one exchange at a time, outlives the
// transport.
class Scratch {
 public:
  static constexpr std::size_t kAlignment = 64;

  // From now on buffers hold at least `bytes`. REQUIRES: none is taken.
  void fit(std::size_t bytes);
  char* take();
  void give(char* buffer);
  std::size_t reserved_bytes() const { return all_.size() * bytes_; }

 private:
  struct Free {
    void operator()(char* buffer) const;
  };
  std::size_t bytes_ = 0;
  std::vector<std::unique_ptr<char, Free>> all_;
  std::vector<char*> free_;
};

// What a call works on.
struct Data {
  char* base = nullptr;  // element 0 of the program's buffer
  DType dtype = DType::f32;
  Op op = Op::sum;
  double scale = 1;           // as the kernels take it
  Codec codec = Codec::none;  // of sums of floating types
  float* residual = nullptr;  // error feedback, one float an element; see codec.hpp
  std::uint64_t seed = 0;     // 0: to nearest; else another for each call and rank: at random
};

// How members make sure that they do the same.
struct Greeting {
  const void* header = nullptr;
  std::size_t bytes = 0;  // alike in all calls of a group
  // Throws Error(Code::collective) naming both calls if `theirs` does not agree with `header`.
  std::function<void(int rank, const void* theirs)> check;
};

class Exchange {
 public:
  // How far it runs ahead of a peer, in chunks. Any values from 1 on are safe.
  struct Limits {
    std::size_t sends = 8;        // posted to it
    std::size_t receives = 8;     // from it: posted, or arrived and not used yet
    std::size_t forwarding = 32;  // encodings of all peers, held until they are forwarded
  };

  // Throws Code::invalid for an operation that does not exist. Member i of the program is ranks[i]
  // of the transport. `program`, `transport`, `scratch` and the memory of `data` outlive the
  // exchange. REQUIRES: when it is destroyed it has finished, or the transport is gone.
  Exchange(const Program& program, const std::vector<int>& ranks, Transport& transport,
           Scratch& scratch, const Data& data, Greeting greeting, const Limits& limits);
  Exchange(const Program& program, const std::vector<int>& ranks, Transport& transport,
           Scratch& scratch, const Data& data, Greeting greeting)
      : Exchange(program, ranks, transport, scratch, data, std::move(greeting), Limits()) {}
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  // The local input of the chunk lies in the buffer. Once for each of program.input_order, best in
  // that order.
  void provide(std::uint32_t chunk);
  // Posts what can be posted, lets the transport move, uses what arrived; true if anything moved.
  // Throws what the transport and the greeting's check throw.
  bool advance();
  bool finished() const { return done_steps_ == program_.steps.size() && finals_ == all_finals_; }
  // A chunk that has become final since the last call, in the order of their becoming so. Its
  // memory is not written again, but may still be read until the exchange has finished.
  std::optional<std::uint32_t> pop_final();
  // A rank that something is awaited from, -1 if only local input is. For the error when time is
  // up.
  int waiting_for() const;

 private:
  struct Channel {
    int rank;
    std::vector<std::uint32_t> out = {}, in = {};  // steps, in order
    std::size_t posted_out = 0, done_out = 0;      // of `out`
    std::size_t posted_in = 0, applied_in = 0;     // of `in`
    Transfer header_out = {}, header_in = {};
    std::vector<char> their_header = {};
    bool greeted = false, checked = false;
  };
  struct Part {  // what is known of a chunk
    bool provided = false, given = false, collected = false;
    char* wire = nullptr;     // encoding of its present value, while sends need it
    std::uint32_t sends = 0;  // of the local input, not done
  };

  void check_operation() const;
  bool pump();
  void greet(Channel& channel);
  bool settle_sends(Channel& channel);
  bool settle_receives(Channel& channel);
  bool post_sends(Channel& channel);
  bool post_receives(Channel& channel);

  const Step& step(std::uint32_t k) const { return program_.steps[k]; }
  bool ready(const Step& step) const;         // the local value that the step needs is there
  bool overwritable(const Step& step) const;  // for a receive
  bool in_place(const Step& step) const;
  bool may_hold(std::uint32_t k);
  bool made_by(std::int32_t source, Step::Kind kind) const;
  std::uint32_t& sends_of(std::int32_t source, std::uint32_t chunk);
  char* data_of(std::uint32_t chunk) const;
  std::size_t wire_bytes(std::uint32_t chunk) const;
  void encode(const Step& step);
  bool apply(std::uint32_t k);
  void combine(std::uint32_t k);
  void finish(std::uint32_t k);
  void make_final(std::uint32_t chunk);

  const Program& program_;
  Transport& transport_;
  Scratch& scratch_;
  const Data data_;
  const Greeting greeting_;
  const Limits limits_;
  const bool coded_;
  const simd::ReduceFn reduce_;

  std::vector<Channel> channels_;
  std::vector<Part> parts_;             // per chunk
  std::vector<Transfer> transfers_;     // per step
  std::vector<std::uint8_t> finished_;  // per step
  std::vector<std::uint32_t> sends_;    // per step: sends of the value it makes, not done
  std::size_t done_steps_ = 0, finals_ = 0, all_finals_ = 0;
  std::size_t forwarding_ = 0;        // received encodings that wait for sends
  std::uint32_t earliest_ = 0;        // every receiving step before has arrived
  std::vector<std::uint32_t> final_;  // in order of becoming final
  std::size_t popped_ = 0;
};

}  // namespace ff::hfreduce
