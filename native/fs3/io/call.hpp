// One call of an Engine: its pieces by node, and the loop that waits for all of its connections at once.
//
// Thread contract: made, run and destroyed by one thread.
// Invariant: what it took from the engine (load, permits, places in their line) it has given back when it is gone.
#pragma once

#include <deque>
#include <vector>

#include "fs3/io/engine.hpp"

namespace ff::fs3::io {

class Engine::Call {
 public:
  static constexpr int kLook = 100;  // ms, at most, until a change of the routing is noticed

  Call(Engine& engine, Lane& lane, FrameKind kind, Clock::time_point deadline);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  void add(Piece& piece);
  void run();

 private:
  struct Queue {  // what goes to one node
    std::uint32_t node;
    Load* load;
    Link* link = nullptr;
    std::vector<Piece*> pieces = {};
    std::size_t next = 0;  // of pieces: the first that was not sent
    unsigned outstanding = 0;
    unsigned direct = 0;        // of these: that its node may answer without asking
    std::uint64_t charged = 0;  // on `load`
  };

  void connect(Queue& queue);
  void end(Queue& queue, Outcome outcome);  // of what was not sent
  void join();               // says whom much will be asked
  bool issue(Queue& queue);  // one frame more; false: nothing to send, or enough outstanding
  bool issue_all();          // as many as can be; whether there was any
  void push();
  bool large(std::uint64_t bytes, const Link* link) const;
  void ask(Queue& queue);  // for a permit, for each of its answers that became ready
  bool take_permits();     // those given while in line; whether there was any
  Request next_frame(const Queue& queue) const;
  void advance(Queue& queue);
  void lose(Queue& queue);  // its connection
  void leave_stale();       // nodes from which the routing now takes what they were asked for
  void answered(Queue& queue, const Request& request);
  bool finished() const;
  void wait();

  Engine& engine_;
  Lane& lane_;
  const FrameKind kind_;
  const Clock::time_point deadline_;
  std::shared_ptr<const Table> table_;
  std::vector<Queue> queues_;
  std::size_t last_ = 0;      // queue of the last piece added
  std::vector<std::uint32_t> joined_;
  struct Ready {
    Queue* queue;
    std::uint64_t request;
  };
  std::deque<Ready> ready_;      // that wait for a permit
  std::uint64_t in_line_ = 0;    // places in the line of the permits: one for each, and for those that were lost there
  unsigned permitted_ = 0;       // requests outstanding that hold one
  std::vector<Request> done_;
};

}  // namespace ff::fs3::io
