// Runs a program over a transport on real memory: the leg of a collective between hosts.
//
// Thread contract: one thread at a time. No clock, no waiting: the caller drives it with advance() and sleeps in
// Transport::wait() when nothing moved.
//
// Chunks are sent from and received into the buffer itself. A value to be added arrives in scratch memory, at most
// Limits::receives chunks ahead per peer. With a wire codec a value is encoded once, where it is computed, and then
// forwarded byte for byte. The member that encodes a value also decodes the encoding, so that all members end with the
// same bits.
//
// The first bytes sent to each member are the caller's header. A member's messages are received only after its header
// was found to agree, because until then not even their length is known. This costs no round trip.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "hfreduce/schedule/program.hpp"
#include "hfreduce/transport/transport.hpp"
#include "simd/codec.hpp"
#include "simd/kernels.hpp"

namespace ff::hfreduce {

// Reusable buffers of one chunk each. At most one exchange at a time uses a Scratch. A Scratch outlives the transport.
class Scratch {
 public:
  static constexpr std::size_t kAlignment = 64;

  // Makes later buffers hold at least `bytes`. REQUIRES: no buffer is taken.
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

// Buffer and element type of a call.
struct Data {
  char* base = nullptr;  // element 0 of the program's buffer
  DType dtype = DType::f32;
  Op op = Op::sum;
  double scale = 1;           // factor of the result, as passed to the kernels
  Codec codec = Codec::none;  // wire codec; other than none only for sums of floating types
  float* residual = nullptr;  // error feedback, one float per element; see codec.hpp
  std::uint64_t seed = 0;     // 0: rounds to nearest; else rounds stochastically. Must differ for each call and rank
};

// Header by which members validate that they run the same call.
struct Handshake {
  const void* header = nullptr;
  std::size_t bytes = 0;  // equal in all calls of a group
  // Throws Error(Code::collective) naming both calls if `theirs` does not agree with `header`.
  std::function<void(int rank, const void* theirs)> check;
};

class Exchange {
 public:
  // Bounds of the chunks in flight with a peer. No bound of at least 1 causes a deadlock.
  struct Limits {
    std::size_t sends = 8;        // posted to the peer
    std::size_t receives = 8;     // from the peer: posted, or arrived and not used yet
    std::size_t forwarding = 32;  // encodings of all peers, held until they are forwarded
  };

  // Throws Code::invalid for an impossible operation. Member i of the program is ranks[i] of the transport. `program`,
  // `transport`, `scratch` and the memory of `data` outlive the exchange. REQUIRES: at destruction it has finished, or
  // the transport is gone.
  Exchange(const Program& program, const std::vector<int>& ranks, Transport& transport, Scratch& scratch,
           const Data& data, Handshake handshake, const Limits& limits);
  Exchange(const Program& program, const std::vector<int>& ranks, Transport& transport, Scratch& scratch,
           const Data& data, Handshake handshake)
      : Exchange(program, ranks, transport, scratch, data, std::move(handshake), Limits()) {}
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  // Reports that the chunk's local input is in the buffer. Call it once for each of program.input_order, preferably in
  // that order.
  void provide(std::uint32_t chunk);
  // Posts transfers, lets the transport move bytes, and uses arrived chunks; returns true if anything moved. Throws
  // what the transport and the handshake's check throw.
  bool advance();
  bool finished() const { return done_steps_ == program_.steps.size() && finals_ == all_finals_; }
  // Returns the next chunk in the order in which chunks become final; none if no further chunk is final yet. The
  // chunk's memory is not written again, but may be read until the exchange has finished.
  std::optional<std::uint32_t> pop_final();
  // Returns a rank whose data is missing, -1 if only local input is missing. For the error on a timeout.
  int waiting_for() const;

 private:
  struct Channel {
    int rank;
    std::vector<std::uint32_t> out = {}, in = {};  // steps, in order
    std::size_t posted_out = 0, done_out = 0;      // steps of `out` that are posted, and that are done
    std::size_t posted_in = 0, applied_in = 0;     // steps of `in` that are posted, and that are used
    Transfer header_out = {}, header_in = {};
    std::vector<char> their_header = {};
    bool handshake_sent = false, checked = false;
  };
  struct Part {  // state of a chunk
    bool provided = false, given = false, collected = false;
    char* wire = nullptr;     // encoding of the chunk's current value, while sends need it
    std::uint32_t sends = 0;  // unfinished sends of the local input
  };

  void check_operation() const;
  bool pump();
  void send_handshake(Channel& channel);
  bool settle_sends(Channel& channel);
  bool settle_receives(Channel& channel);
  bool post_sends(Channel& channel);
  bool post_receives(Channel& channel);

  const Step& step(std::uint32_t k) const { return program_.steps[k]; }
  bool ready(const Step& step) const;         // the local value that the step needs is available
  bool overwritable(const Step& step) const;  // a receive may overwrite the chunk
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
  const Handshake handshake_;
  const Limits limits_;
  const bool coded_;
  const simd::ReduceFn reduce_;

  std::vector<Channel> channels_;
  std::vector<Part> parts_;             // per chunk
  std::vector<Transfer> transfers_;     // per step
  std::vector<std::uint8_t> finished_;  // per step
  std::vector<std::uint32_t> sends_;    // per step: unfinished sends of the step's result
  std::size_t done_steps_ = 0, finals_ = 0, all_finals_ = 0;
  std::size_t forwarding_ = 0;        // received encodings that wait to be forwarded
  std::uint32_t earliest_ = 0;        // all receiving steps before it have arrived
  std::vector<std::uint32_t> final_;  // in order of becoming final
  std::size_t popped_ = 0;
};

}  // namespace ff::hfreduce
