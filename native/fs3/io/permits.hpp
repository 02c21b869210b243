// The right to be sent much at once ("request to send" of the paper): so many may send at a time.
//
//   direct: a node that may send whenever it can, as long as few nodes are asked for much; all its answers share one permit
//   ask:    an answer that a node holds in memory; one permit each, in the order in which they became ready
//
// Thread contract: all calls from any thread.
// Invariants
//   - Nodes that are direct + answers that were asked for and granted <= `count`.
//   - While somebody stands in line no node is given another direct answer: so permits come free.
//   - Each place in line is granted or left, once; a grant is told by the eventfd of its place, which counts them.
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

  // Much will be asked of these nodes, until `part`.
  void join(std::span<const std::uint32_t> nodes);
  void part(std::span<const std::uint32_t> nodes);

  // True: this node, of those that joined, may answer without asking, until `over`.
  bool direct(std::uint32_t node);
  void over(std::uint32_t node);

  // True: it is granted, until `give_back`. False: it stands in line with this eventfd.
  bool ask(int wake);
  void give_back();
  // Leaves all places of this eventfd; returns how many had been granted and not been read from it.
  std::uint64_t leave(int wake);

  unsigned used() const;  // permits
  unsigned most() const;  // that were used at a time

 private:
  struct Node {
    unsigned asking = 0;  // calls
    unsigned direct = 0;  // answers
  };
  void take();   // REQUIRES: mutex_, one is free
  void freed();  // REQUIRES: mutex_. One is: it goes to the next in line

  const unsigned count_;
  mutable std::mutex mutex_;  // guards what follows
  unsigned used_ = 0, most_ = 0;
  std::unordered_map<std::uint32_t, Node> nodes_;  // of whom much is asked
  std::deque<int> line_;
};

}  // namespace ff::fs3::io
