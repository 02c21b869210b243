// One connection: frames in, answers out.
//
//   socket -> inbox -> Frame (head, table, payload in a Buffer)        by the owner
//   socket <- pieces of memory and of files, in order of send()       by whoever has the lock
//
// Thread contract: `receive` by one thread at a time, the *owner*. `send` and `flush` by any thread. The descriptor is
// the Line's and closed with it.
// Invariants
//   - What is sent leaves in the order of the calls, each Outgoing without others between its pieces.
//   - After a failure or an end nothing more is read or written; `broken` says so.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "fs3/io/pool.hpp"
#include "fs3/io/wire.hpp"

namespace ff::fs3::io {

struct Frame {
  Head head;
  std::vector<std::byte> table;
  Buffer payload;  // head.payload_bytes of it
};

// Bytes to send: memory, or a range of a file. What holds them lives until they left.
struct Outgoing {
  struct Piece {
    const std::byte* memory;  // null: of the file
    int file;
    std::uint64_t position;
    std::size_t bytes;
  };
  std::vector<Piece> pieces;
  std::vector<std::byte> table;  // for pieces that point into it
  std::vector<int> descriptors;  // that go with the first byte, on a Unix socket; `holds` keeps them open
  Buffer buffer;
  std::vector<std::shared_ptr<void>> holds;

  void add(const void* memory, std::size_t bytes);
  void add_file(int file, std::uint64_t position, std::size_t bytes);
};

class Line {
 public:
  static constexpr std::size_t kInbox = std::size_t{64} << 10;
  static constexpr std::size_t kMostWaiting = std::size_t{8} << 20;  // bytes; then requests are not read

  using Pools = std::function<Pool&(const Head&)>;  // where the payload of a frame goes

  Line(int fd, Pools pools);  // takes the descriptor, which must not block
  ~Line();
  Line(const Line&) = delete;
  Line& operator=(const Line&) = delete;

  enum class Got { frame, nothing, starved, broken };
  // frame: `frame` is the next one. nothing: all that arrived is taken. starved: no memory for the payload of the next
  // frame; call again when `starved_pool` has some. broken: the end, or a peer that does not keep to the rules.
  Got receive(Frame& frame);
  Pool& starved_pool() const { return *starved_; }

  void send(Outgoing outgoing);
  // Sends what the socket takes; returns whether nothing waits any more. Nothing is sent where another thread does so:
  // that one takes along what was added meanwhile.
  bool flush();
  std::size_t waiting() const;  // bytes to send
  bool holds() const;           // whether what waits holds something until it left
  bool broken() const;
  void shut();  // breaks it from here; the owner sees it in `receive`
  void end();   // likewise, and returns when nothing is held any more that was to be sent
  int fd() const { return fd_; }

 private:
  bool fill();  // reads into the inbox; false: nothing there, or broken
  std::size_t take(std::byte* to, std::size_t bytes);
  Got payload(Frame& frame);
  struct Pushed {
    std::size_t bytes = 0;
    bool full = false, broke = false;  // the socket
  };
  Pushed push_one(const Outgoing& front, std::size_t at, std::size_t skip) const;
  void advance(std::size_t bytes, std::deque<Outgoing>& gone);
  void forget(std::deque<Outgoing>& gone);
  void fail();

  const int fd_;
  const Pools pools_;

  // The owner's.
  std::vector<std::byte> inbox_;
  std::size_t begin_ = 0, end_ = 0;
  Frame next_;
  std::size_t have_ = 0;  // bytes of the part of next_ that is being read
  enum class Part { head, table, payload } part_ = Part::head;
  Pool* starved_ = nullptr;

  mutable std::mutex mutex_;  // guards what follows
  std::deque<Outgoing> out_;
  std::size_t piece_ = 0, sent_ = 0;  // of out_.front()
  std::size_t waiting_ = 0;
  bool sending_ = false;  // somebody does, without the lock: the front of out_ is his
  std::condition_variable idle_;  // he does not any more
  bool broken_ = false;
};

}  // namespace ff::fs3::io
