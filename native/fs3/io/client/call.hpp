// One call of an Engine: its pieces by node, and the loop that waits for all of its connections at once.
//
// Thread contract: made, run and destroyed by one thread.
// Invariant: on destruction the call has returned everything that it took from the engine (load, permits, places in the
// permits' queue).
#pragma once

#include <deque>
#include <vector>

#include "fs3/io/client/engine.hpp"

namespace ff::fs3::io {

class Engine::Call {
 public:
  static constexpr int kRoutingCheckMs = 100;  // maximum delay until a change of the routing is noticed

  Call(Engine& engine, Lane& lane, FrameKind kind, Clock::time_point deadline);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  void add(Piece& piece);
  void run();

 private:
  struct Queue {  // pieces for one node
    std::uint32_t node;
    Load* load;
    Link* link = nullptr;
    std::vector<Piece*> pieces = {};
    std::size_t next = 0;  // index in `pieces` of the first unsent piece
    unsigned outstanding = 0;
    unsigned direct = 0;        // number of outstanding frames that the node may answer without asking
    std::uint64_t charged = 0;  // amount added to `load`
  };

  void connect(Queue& queue);
  void end(Queue& queue, Outcome outcome);  // sets the outcome of the pieces that were not sent
  void join();                              // announces the nodes from which many bytes are requested
  bool issue(Queue& queue);                 // sends one more frame; false: no piece left, or enough frames outstanding
  bool issue_all();                         // sends as many frames as possible; returns whether it sent any
  void push();
  bool large(std::uint64_t bytes, const Link* link) const;
  void ask(Queue& queue);  // asks for a permit for each answer of the node that became ready
  bool take_permits();     // takes the permits granted while queued; returns whether there was any
  Request next_frame(const Queue& queue) const;
  void advance(Queue& queue);
  void lose(Queue& queue);  // closes the node's connection
  void leave_stale();       // ends waits for nodes that no longer serve the open pieces by the new routing
  void answered(Queue& queue, const Request& request);
  bool finished() const;
  void wait();

  Engine& engine_;
  Lane& lane_;
  const FrameKind kind_;
  const Clock::time_point deadline_;
  std::shared_ptr<const Table> table_;
  std::vector<Queue> queues_;
  std::size_t last_ = 0;  // queue of the last piece added
  std::vector<std::uint32_t> joined_;
  struct Ready {
    Queue* queue;
    std::uint64_t request;
  };
  std::deque<Ready> ready_;         // answers that wait for a permit
  std::uint64_t queue_places_ = 0;  // places in the permits' queue, also for answers of lost connections
  unsigned permitted_ = 0;          // outstanding requests that hold a permit
  std::vector<Request> done_;
};

}  // namespace ff::fs3::io
