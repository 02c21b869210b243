// NUMA placement of the parts of a team's control segment.
//
// The rules of the Fire-Flyer paper: memory into which devices and ranks copy their inputs is interleaved over the
// nodes, so that every socket reads at the combined rate. Result memory is bound to the network card's node. The gates
// and slots at the beginning stay where they are first touched.
//
// Thread contract: pure functions, and one that sets policies before any thread touches the memory.
#pragma once

#include <cstddef>
#include <vector>

#include "base/memory/numa.hpp"

namespace ff::hfreduce {

// Offsets of the rings of a control segment, in bytes. Every offset is a multiple of the page size.
struct ControlLayout {
  std::size_t staging;  // rings of all members' inputs
  std::size_t result;   // ring of sums
  std::size_t end;
};
ControlLayout control_layout(std::size_t members);

struct Placed {
  std::size_t offset, bytes;
  numa::Policy policy;

  bool operator==(const Placed&) const = default;
};

// Returns an empty plan if there are fewer than two nodes. `nic_node`: the network card's node, or -1 if unknown. The
// ring of sums has no policy if that node is unknown or its memory may not be used.
std::vector<Placed> plan_placement(const ControlLayout& layout, const std::vector<int>& nodes, int nic_node);
// Sets the policies of the plan. Throws what numa::set_policy throws.
void apply_placement(const std::vector<Placed>& plan, char* segment, const numa::Calls& calls = numa::kernel());

}  // namespace ff::hfreduce
