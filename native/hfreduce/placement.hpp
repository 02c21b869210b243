// On which memory nodes the parts of a team's control segment lie.
//
// The paper's rules: memory that devices and ranks copy their inputs to is interleaved over the nodes, so that every
// socket reads at the rate of all of them; memory of results is bound to the network card's node. The gates and slots
// at the begin stay where they are first touched.
//
// Thread contract: pure functions, and one that sets policies before anybody has touched the memory.
#pragma once

#include <cstddef>
#include <vector>

#include "base/numa.hpp"

namespace ff::hfreduce {

// Where the rings of a control segment begin, in bytes. Every boundary lies between pages.
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

// Nothing where there are not two nodes to choose from. `nic_node`: -1 where it is not known; then, or where its
// memory may not be used, sums have no policy.
std::vector<Placed> plan_placement(const ControlLayout& layout, const std::vector<int>& nodes, int nic_node);
// Throws what numa::set_policy does.
void apply_placement(const std::vector<Placed>& plan, char* segment, const numa::Calls& calls = numa::kernel());

}  // namespace ff::hfreduce
