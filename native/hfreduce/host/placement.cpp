#include "hfreduce/host/placement.hpp"

#include <algorithm>

#include "hfreduce/host/team.hpp"

namespace ff::hfreduce {

ControlLayout control_layout(std::size_t members) {
  constexpr std::size_t ring = kDepth * kChunkBytes;
  const std::size_t end = Team::control_bytes(members);
  return {end - (members + 1) * ring, end - ring, end};
}

std::vector<Placed> plan_placement(const ControlLayout& layout, const std::vector<int>& nodes, int nic_node) {
  if (nodes.size() < 2) return {};
  std::vector<Placed> plan{{layout.staging, layout.result - layout.staging, {numa::Mode::interleave, nodes}}};
  if (std::find(nodes.begin(), nodes.end(), nic_node) != nodes.end()) {
    plan.push_back({layout.result, layout.end - layout.result, {numa::Mode::bind, {nic_node}}});
  }
  return plan;
}

void apply_placement(const std::vector<Placed>& plan, char* segment, const numa::Calls& calls) {
  for (const Placed& part : plan) {
    numa::set_policy(segment + part.offset, part.bytes, part.policy, calls);
  }
}

}  // namespace ff::hfreduce
