#include "hfreduce/host/placement.hpp"

#include <linux/mempolicy.h>

#include "base/memory/segment.hpp"
#include "base/testing/check.hpp"
#include "base/testing/one_thread.hpp"
#include "hfreduce/host/team.hpp"

namespace {

using ff::hfreduce::Placed;
using ff::numa::Mode;

void one_node_needs_no_plan() {
  const auto layout = ff::hfreduce::control_layout(4);
  CHECK(ff::hfreduce::plan_placement(layout, {}, -1).empty());
  CHECK(ff::hfreduce::plan_placement(layout, {0}, 0).empty());
  CHECK(ff::hfreduce::plan_placement(layout, {3}, 3).empty());
}

void several_nodes() {
  const ff::hfreduce::ControlLayout layout{4096, 3 * 4096, 5 * 4096};
  for (const std::vector<int>& nodes : {std::vector{0, 1}, std::vector{0, 1, 2, 3}}) {
    const Placed inputs{4096, 2 * 4096, {Mode::interleave, nodes}};
    const Placed sums{3 * 4096, 2 * 4096, {Mode::bind, {1}}};
    CHECK((ff::hfreduce::plan_placement(layout, nodes, 1) == std::vector{inputs, sums}));
    CHECK((ff::hfreduce::plan_placement(layout, nodes, -1) == std::vector{inputs}));
    CHECK((ff::hfreduce::plan_placement(layout, nodes, 7) == std::vector{inputs}));
  }
}

void the_layout_is_that_of_the_team() {
  constexpr std::size_t ring = ff::hfreduce::kDepth * ff::hfreduce::kChunkBytes;
  for (const std::size_t members : {1u, 2u, 7u, 64u}) {
    const auto layout = ff::hfreduce::control_layout(members);
    CHECK(layout.end == ff::hfreduce::Team::control_bytes(members));
    CHECK(layout.end - layout.result == ring && layout.result - layout.staging == members * ring);
    CHECK(layout.staging > 0 && layout.staging % 4096 == 0 && layout.end % 4096 == 0);
  }
}

void application_calls_the_kernel_once_a_range() {
  struct Call {
    std::size_t offset;
    unsigned long bytes;
    int mode;
    unsigned long nodes;
    bool operator==(const Call&) const = default;
  };
  std::vector<Call> calls;
  char* begin = nullptr;
  ff::numa::Calls recorder;
  recorder.mbind = [&](void* start, unsigned long bytes, int mode, const unsigned long* mask, unsigned long, unsigned) {
    calls.push_back({static_cast<std::size_t>(static_cast<char*>(start) - begin), bytes, mode, mask[0]});
    return 0L;
  };
  const auto layout = ff::hfreduce::control_layout(2);
  const auto plan = ff::hfreduce::plan_placement(layout, {0, 1, 2, 3}, 2);
  const ff::Segment segment = ff::Segment::create("test", layout.end, [&](char* data) {
    begin = data;
    ff::hfreduce::apply_placement(plan, data, recorder);
  });
  const Call inputs{layout.staging, layout.result - layout.staging, MPOL_INTERLEAVE, 0b1111};
  const Call sums{layout.result, layout.end - layout.result, MPOL_BIND, 0b100};
  CHECK((calls == std::vector{inputs, sums}));
}

}  // namespace

int main() {
  one_node_needs_no_plan();
  several_nodes();
  the_layout_is_that_of_the_team();
  application_calls_the_kernel_once_a_range();
}
