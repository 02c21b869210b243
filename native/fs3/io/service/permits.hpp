// Permits for large transfers ("request to send", docs/internals/fs3-service.md): they bound how many nodes and answers
// may send at a time.
//
//   direct: if few nodes are asked for large transfers, a node may send at any time; its answers share one permit
//   ask:    an answer that a node holds in memory takes one permit, in the order in which answers become ready
//
// Thread contract: all calls from any thread.
// Invariants
//   - The number of nodes with direct answers plus the number of answers with a permit is at most `count`.
//   - While an answer is queued no node is given another direct answer, so that permits become free.
//   - Each queued request is either granted once or leaves the queue; its eventfd counts the grants.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <span>
#include <unordered_map>

namespace ff::fs3::io {

class Permits {
 public:
  explicit Permits(unsigned count) : count_(count) {}

  // Announces that large transfers will be requested from these nodes, until `part`.
  void join(std::span<const std::uint32_t> nodes);
  void part(std::span<const std::uint32_t> nodes);

  // Returns true if this node, which has joined, may answer without asking, until `over`.
  bool direct(std::uint32_t node);
  void over(std::uint32_t node);

  // Returns true if a permit is granted, until `give_back`; false if the request is queued with this eventfd.
  bool ask(int wake);
  void give_back();
  // Leaves all places of this eventfd; returns the number of grants that were not read from the eventfd yet.
  std::uint64_t leave(int wake);

  unsigned used() const;  // permits in use
  unsigned most() const;  // most permits ever in use at a time

 private:
  struct Node {
    unsigned asking = 0;  // calls between `join` and `part`
    unsigned direct = 0;  // answers between `direct` and `over`
  };
  void take();   // REQUIRES: mutex_, a free permit
  void freed();  // REQUIRES: mutex_. Passes the freed permit to the next in the queue

  const unsigned count_;
  mutable std::mutex mutex_;  // guards the members below
  unsigned used_ = 0, most_ = 0;
  std::unordered_map<std::uint32_t, Node> nodes_;  // nodes of which large transfers are asked
  std::deque<int> line_;                           // eventfds of the queued requests, oldest first
};

}  // namespace ff::fs3::io
