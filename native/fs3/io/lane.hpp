// A client's connections: a Link to one server, and a Lane of one to each that was needed.
//
//   post -> unsent frames -> socket -> answers, in any order -> outcomes of pieces
//   post, held -> ready -> `take_ready` -> go -> answer
//
// Thread contract: one thread at a time; nothing here waits.
// Invariants
//   - A piece in a posted request has an outcome once the request is in `answered`; if the link broke: `lost`, unless
//     its own answer had come.
//   - What the other side sends against the rules breaks the link, and nothing of it is taken for an answer.
//   - A held request is ready at most once, and after that answered only if it was told to go.
//   - A link that is not idle at the end of a call is closed: its answers would go to memory that nobody holds.
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

#include "fs3/io/landing.hpp"
#include "fs3/io/local.hpp"
#include "fs3/io/piece.hpp"
#include "fs3/io/wire.hpp"

namespace ff::fs3::io {

struct Request {
  using Clock = std::chrono::steady_clock;
  std::uint64_t id = 0;
  FrameKind kind = FrameKind::read;
  std::vector<Piece*> pieces;  // one chain version each, and for writes a tag
  std::uint64_t bytes = 0;     // sum of the lengths
  bool direct = false;         // the caller's: its node may send without asking
  bool held = false;           // much of an answer waits for `go`
  bool ready = false;          // it does
  bool permitted = false;      // it was told to go
  bool local = false;          // it was answered with places
  Clock::time_point posted = {};
};

class Link {
 public:
  // Takes the descriptor. `local`: what lies on this machine is read by this side, if the connection allows it.
  explicit Link(int fd, bool local = false);
  ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  // REQUIRES: pieces and their memory stay until the request was answered or the link is gone; a frame's limits.
  void post(Request request, std::uint64_t client);
  // Sends and receives what the socket takes and has, for a bounded time. False: broken; all requests are in `answered`.
  bool advance(std::vector<Request>& answered);
  void give_up(std::vector<Request>& answered);  // breaks it from here
  // Held requests that became ready since the last time, in order.
  std::vector<std::uint64_t> take_ready() { return std::exchange(ready_, {}); }
  // REQUIRES: it is ready and not permitted, and the link not broken.
  void go(std::uint64_t request);
  short events() const;                          // what to poll for
  bool idle() const { return !broken_ && outstanding_.empty() && unsent_.empty(); }
  bool quiet() const;  // of an idle one: the other side sent nothing and is still there
  int fd() const { return fd_; }
  bool local() const { return local_ != nullptr; }
  bool overflown() const { return local_ && local_->overflown(); }

 private:
  struct Unsent {
    std::vector<std::byte> bytes;  // head and table
    std::vector<iovec> parts;      // all of the frame
    std::size_t at = 0;            // of parts
  };
  enum class Part { head, table, payload };

  void send_frame(Head head, std::vector<std::byte> table, std::vector<iovec> payload);
  bool flush();
  bool receive(std::vector<Request>& answered);
  bool fill(std::byte* to, std::size_t bytes);  // true: all came
  bool began();                                 // a head came: does it concern something outstanding?
  bool tabled(std::vector<Request>& answered);  // its table came: likewise
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

  // The frame that is coming.
  Part part_ = Part::head;
  std::size_t have_ = 0;  // bytes of that part
  Head head_;
  std::vector<std::byte> table_;
  std::list<Request>::iterator answering_;
  Landing landing_;
  std::unique_ptr<LocalFiles> local_;
  bool dry_ = false;  // the socket had nothing more
};

class Lane {
 public:
  Lane();
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  std::unordered_map<std::uint32_t, std::unique_ptr<Link>> links;  // by node
  int wake() const { return wake_; }  // an eventfd: so many permits were given
  void drop_busy();                   // closes links that are not idle

 private:
  const int wake_;
};

}  // namespace ff::fs3::io
