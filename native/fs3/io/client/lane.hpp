// A client's connections: a Link is a connection to one server; a Lane has a Link to each server that was needed.
//
//   post -> unsent frames -> socket -> answers, in any order -> outcomes of pieces
//   post, held -> ready -> `take_ready` -> go -> answer
//
// Thread contract: one thread at a time; no call waits.
// Invariants
//   - A piece in a posted request has an outcome once the request is in `answered`. If the link broke, the outcome is
//     `lost`, unless the piece's own answer had arrived.
//   - A protocol violation by the peer breaks the link; the offending frame never counts as an answer.
//   - A held request becomes ready at most once; afterwards it is answered only after `go`.
//   - A link that is not idle at the end of a call is closed, because the caller may reuse the memory of its answers.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "fs3/io/client/local_files.hpp"
#include "fs3/io/client/piece.hpp"
#include "fs3/io/client/read_placement.hpp"
#include "fs3/io/wire/wire.hpp"

namespace ff::fs3::io {

struct Request {
  using Clock = std::chrono::steady_clock;
  std::uint64_t id = 0;
  FrameKind kind = FrameKind::read;
  std::vector<Piece*> pieces;  // each has a chain version, and for a write a tag
  std::uint64_t bytes = 0;     // sum of the lengths
  bool direct = false;         // set by the caller: the node may send without asking
  bool held = false;           // a large answer waits for `go`
  bool ready = false;          // its answer is ready
  bool permitted = false;      // `go` was sent for its answer
  bool local = false;          // its answer named places in files
  Clock::time_point posted = {};
};

class Link {
 public:
  // Takes ownership of `fd`. `local`: read chunks on this machine from their files, if the connection allows it.
  explicit Link(int fd, bool local = false);
  ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  // REQUIRES: pieces and their memory stay until the request is answered or the link is destroyed; the request is
  // within the limits of a frame.
  void post(Request request, std::uint64_t client);
  // Sends and receives what the socket allows, for a bounded time. Returns false if the link is broken; all requests
  // are then in `answered`.
  bool advance(std::vector<Request>& answered);
  void give_up(std::vector<Request>& answered);  // breaks the link from this side
  // Returns the held requests that became ready since the last call, in order.
  std::vector<std::uint64_t> take_ready() { return std::exchange(ready_, {}); }
  // REQUIRES: the request is ready and not permitted, and the link is not broken.
  void go(std::uint64_t request);
  short events() const;  // events to poll for
  bool idle() const { return !broken_ && outstanding_.empty() && unsent_.empty(); }
  bool quiet() const;  // for an idle link: the peer sent nothing and is still connected
  int fd() const { return fd_; }
  bool local() const { return local_ != nullptr; }
  bool overflown() const { return local_ && local_->overflown(); }

 private:
  struct Unsent {
    std::vector<std::byte> bytes;  // head and table
    std::vector<iovec> parts;      // iovecs of the whole frame
    std::size_t at = 0;            // index in `parts`
  };
  enum class Part { head, table, payload };

  void send_frame(Head head, std::vector<std::byte> table, std::vector<iovec> payload);
  bool flush();
  bool receive(std::vector<Request>& answered);
  bool fill(std::byte* to, std::size_t bytes);  // true: all bytes have arrived
  bool began();                                 // after a head: true if it answers an outstanding request
  bool tabled(std::vector<Request>& answered);  // after the table: true if the table is valid for that request
  bool take_writes(const Request& request) const;
  bool take_queries(const Request& request) const;
  void finish(std::vector<Request>& answered);
  void report(const Request& request);
  bool land();
  bool read_local(std::vector<Request>& answered);

  const int fd_;
  bool broken_ = false;
  std::uint64_t next_id_ = 1;
  std::list<Request> outstanding_;
  std::deque<Unsent> unsent_;
  std::vector<std::uint64_t> ready_;

  // The frame being received.
  Part part_ = Part::head;
  std::size_t have_ = 0;  // bytes received of that part
  Head head_;
  std::vector<std::byte> table_;
  std::list<Request>::iterator answering_;
  ReadPlacement landing_;
  std::unique_ptr<LocalFiles> local_;
  bool drained_ = false;  // the socket had no more bytes
};

class Lane {
 public:
  Lane();
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  std::unordered_map<std::uint32_t, std::unique_ptr<Link>> links;  // by node
  int wake() const { return wake_; }                               // an eventfd that counts granted permits
  void drop_busy();                                                // closes links that are not idle

 private:
  const int wake_;
};

}  // namespace ff::fs3::io
