// One connection: frames in, answers out.
//
//   socket -> inbox -> Frame (head, table, payload in a Buffer)        by the owner
//   socket <- pieces of memory and of files, in order of send()       by the sending thread
//
// Thread contract: `receive` by one thread at a time, the *owner*. `send` and `flush` by any thread. The
// FrameConnection owns the descriptor and closes it.
// Invariants
//   - Bytes leave in the order of the calls; the pieces of one Outgoing stay together.
//   - After a failure or an end of stream no byte is read or written; `broken` returns true.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "fs3/io/wire/pool.hpp"
#include "fs3/io/wire/wire.hpp"

namespace ff::fs3::io {

struct Frame {
  Head head;
  std::vector<std::byte> table;
  Buffer payload;  // only the first head.payload_bytes bytes are the payload
};

// Bytes to send, from memory or from a range of a file. The objects in `holds` live until the bytes are sent.
struct Outgoing {
  struct Piece {
    const std::byte* memory;  // null: from the file
    int file;
    std::uint64_t position;
    std::size_t bytes;
  };
  std::vector<Piece> pieces;
  std::vector<std::byte> table;  // memory for pieces that point into it
  std::vector<int> descriptors;  // passed with the first byte, on a Unix socket; `holds` keeps them open
  Buffer buffer;
  std::vector<std::shared_ptr<void>> holds;

  void add(const void* memory, std::size_t bytes);
  void add_file(int file, std::uint64_t position, std::size_t bytes);
};

class FrameConnection {
 public:
  static constexpr std::size_t kInbox = std::size_t{64} << 10;
  static constexpr std::size_t kMostWaiting = std::size_t{8} << 20;  // bytes; while more bytes wait, no request is read

  using Pools = std::function<Pool&(const Head&)>;  // chooses the pool for a frame's payload

  FrameConnection(int fd, Pools pools);  // takes ownership of `fd`, which must be non-blocking
  ~FrameConnection();
  FrameConnection(const FrameConnection&) = delete;
  FrameConnection& operator=(const FrameConnection&) = delete;

  enum class Got { frame, nothing, starved, broken };
  // Result frame: `frame` is the next one. nothing: all arrived bytes are taken. starved: no memory for the payload of
  // the next frame; call again when `starved_pool` has some. broken: the stream ended, or the peer violated the
  // protocol.
  Got receive(Frame& frame);
  Pool& starved_pool() const { return *starved_; }

  void send(Outgoing outgoing);
  // Sends as many bytes as the socket accepts; returns whether no bytes wait any more. If another thread is sending,
  // sends nothing: that thread also sends the bytes added meanwhile.
  bool flush();
  std::size_t waiting() const;  // bytes to send
  bool broken() const;
  void shut();  // breaks the connection from this side; the owner's `receive` reports it
  // Sends as many bytes as the socket accepts, then breaks the connection if an Outgoing with `holds` still waits.
  // Afterwards no object is held that was held before.
  void drop_holders();
  int fd() const { return fd_; }

 private:
  bool fill();  // reads into the inbox; false: no bytes available, or broken
  std::size_t take(std::byte* to, std::size_t bytes);
  Got payload(Frame& frame);
  struct Pushed {
    std::size_t bytes = 0;
    bool full = false, broke = false;  // state of the socket
  };
  Pushed push_one(const Outgoing& front, std::size_t at, std::size_t skip) const;
  void advance(std::size_t bytes, std::deque<Outgoing>& gone);
  void forget(std::deque<Outgoing>& gone);
  void fail();

  const int fd_;
  const Pools pools_;

  // Used by the owner only.
  std::vector<std::byte> inbox_;
  std::size_t begin_ = 0, end_ = 0;
  Frame next_;
  std::size_t have_ = 0;  // bytes already read of the current part of next_
  enum class Part { head, table, payload } part_ = Part::head;
  Pool* starved_ = nullptr;

  mutable std::mutex mutex_;  // guards the members below
  std::deque<Outgoing> out_;
  std::size_t piece_ = 0, sent_ = 0;  // next piece of out_.front(), and its bytes that are sent already
  std::size_t waiting_ = 0;           // unsent bytes of out_
  bool sending_ = false;              // a thread sends without the lock and owns the front of out_
  std::condition_variable idle_;      // signals the end of sending
  bool broken_ = false;
};

}  // namespace ff::fs3::io
