// Steps of one member of a collective between hosts, as data: no I/O, no clock, no memory.
//
// A program is made for one of M members. The buffer is cut into the same chunks on all members; a step moves one chunk
// between two members. Invariants of every builder:
//   1. The steps between two members, in each direction, are in the same order in both programs (FIFO matching).
//   2. There is one order of all messages of all members that agrees with every program and every `after`. So the
//      earliest undelivered message can always move, and no order of delivery deadlocks.
//   3. A receive or reduce comes `after` every earlier send of its chunk. A collect does not: the executor waits for
//      the sends of the chunk before the last collect adds.
// docs/internals/hfreduce-network.md draws the algorithms and gives their costs.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ff::hfreduce {

struct Chunk {
  std::size_t begin, count;  // elements
};

struct Step {
  enum class Kind : std::uint8_t {
    send,
    receive,  // the received data replaces the chunk
    reduce,   // the received data is added to the chunk
    collect,  // the received data is kept; the chunk's last collect adds all inputs, the member's own too, in order
  } kind;
  std::uint16_t peer;  // member
  std::uint32_t chunk;
  std::int32_t after;  // earlier step that must be finished; -1: only the local input is needed
  bool last;           // makes this member's chunk final; a reduction then applies the scale
};

struct Program {
  std::uint16_t me = 0;
  std::vector<Chunk> chunks;
  std::vector<std::uint32_t> input_order;  // chunks whose local input is needed, in order of need
  std::vector<std::uint32_t> given;        // chunks whose local input is already the final value
  std::vector<Step> steps;
};

// Division of a buffer: chunks of about `chunk` elements that begin on multiples of `align` elements.
struct Cut {
  std::size_t count, chunk, align = 1;
};

// --- Ring: member i sends only to i+1. Each member sends (M-1)/M of the buffer in each half (reduce-scatter,
// all-gather) of an allreduce. ---

Program ring_allreduce(std::size_t me, std::size_t members, const Cut& cut);
// In a reduce-scatter, member i ends with the sum of blocks[i]; in an all-gather, it begins with the value of blocks[i].
// Blocks may be empty and lie anywhere, without overlap. `cut.count` is ignored.
Program ring_reduce_scatter(std::size_t me, const std::vector<Chunk>& blocks, const Cut& cut);
Program ring_all_gather(std::size_t me, const std::vector<Chunk>& blocks, const Cut& cut);

// --- Chain: a pipeline through all members that begins or ends at the root. Each link carries the
// buffer once. ---

Program chain_broadcast(std::size_t me, std::size_t members, std::size_t root, const Cut& cut);
Program chain_reduce(std::size_t me, std::size_t members, std::size_t root, const Cut& cut);

// --- Double binary tree: even chunks go over one tree, odd chunks over the other. ---

struct Tree {
  std::vector<int> parent;                           // of each member, -1 at the root
  std::vector<std::vector<std::uint16_t>> children;  // at most two, in the order of addition
  std::vector<std::uint32_t> depth;                  // 0 at the root
  std::uint32_t height = 0;                          // greatest depth
};

// zones[i] is the label of member i's zone. Each tree has one edge into each zone except the zone of its root. If
// root < 0, no member has children in both trees. Otherwise `root` is the root of both trees, and no other member has
// children in both.
std::array<Tree, 2> double_tree(const std::vector<std::uint32_t>& zones, int root = -1);

Program tree_allreduce(std::size_t me, const std::vector<std::uint32_t>& zones, const Cut& cut);
Program tree_reduce(std::size_t me, const std::vector<std::uint32_t>& zones, std::size_t root, const Cut& cut);
Program tree_broadcast(std::size_t me, const std::vector<std::uint32_t>& zones, std::size_t root, const Cut& cut);

// --- For small buffers ---

// Every member sends its whole buffer to every member: one hop, M-1 buffers sent by each. For up to about 8 members.
Program direct_allreduce(std::size_t me, std::size_t members, const Cut& cut);
// Doubles the number of holders per round: ceil(log2 M) hops.
Program binomial_broadcast(std::size_t me, std::size_t members, std::size_t root, const Cut& cut);

}  // namespace ff::hfreduce
