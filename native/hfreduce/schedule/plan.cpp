#include "hfreduce/schedule/plan.hpp"

#include <algorithm>
#include <utility>

namespace ff::hfreduce {
namespace {

constexpr std::size_t kLaneBytes = 128u << 10;  // minimum bytes of a lane; a smaller lane is not worth its messages
constexpr std::size_t kChunk = 64u << 10;       // bytes per message; at most kChunkBytes for all lanes together
constexpr std::size_t kPlans = 256;             // maximum number of cached plans

}  // namespace

std::vector<Rule> default_rules() {
  const auto small = std::size_t{32} << 10;
  return {
      {Kind::allreduce, 32, kAnyBytes, Algorithm::tree, 0}, {Kind::allreduce, 9, small, Algorithm::tree, 1},
      {Kind::allreduce, 2, small, Algorithm::direct, 1},    {Kind::allreduce, 2, kAnyBytes, Algorithm::ring, 0},
      {Kind::broadcast, 2, small, Algorithm::direct, 1},    {Kind::broadcast, 16, kAnyBytes, Algorithm::tree, 0},
      {Kind::broadcast, 2, kAnyBytes, Algorithm::chain, 0}, {Kind::reduce, 4, small, Algorithm::tree, 1},
      {Kind::reduce, 16, kAnyBytes, Algorithm::tree, 0},    {Kind::reduce, 2, kAnyBytes, Algorithm::chain, 0},
  };
}

Rule choose_rule(const std::vector<Rule>& rules, Kind kind, std::size_t hosts, std::size_t bytes) {
  const auto applies = [&](const Rule& rule) {
    return rule.kind == kind && hosts >= rule.hosts && bytes <= rule.bytes;
  };
  const auto found = std::find_if(rules.begin(), rules.end(), applies);
  if (found != rules.end()) return *found;
  const std::vector<Rule> defaults = default_rules();
  return *std::find_if(defaults.begin(), defaults.end(), applies);
}

std::size_t Layout::lanes() const {
  std::size_t least = SIZE_MAX;
  for (const auto& ranks : hosts) least = std::min(least, ranks.size());
  return least;
}

bool Layout::even() const {
  return std::all_of(hosts.begin(), hosts.end(), [&](const auto& ranks) { return ranks.size() == hosts[0].size(); });
}

std::pair<std::size_t, std::size_t> Layout::find(int rank) const {
  for (std::size_t h = 0; h < hosts.size(); ++h) {
    const auto at = std::find(hosts[h].begin(), hosts[h].end(), rank);
    if (at != hosts[h].end()) return {h, static_cast<std::size_t>(at - hosts[h].begin())};
  }
  throw Error(Code::invalid, "rank " + std::to_string(rank) + " is not in the group");
}

void Planner::set_rules(std::vector<Rule> rules) {
  const std::lock_guard lock(mutex_);
  rules_ = std::move(rules);
  plans_.clear();
}

std::shared_ptr<const Plan> Planner::plan(const Call& call, std::size_t width) {
  const std::lock_guard lock(mutex_);
  const auto key = std::make_tuple(call.kind, call.count, width, call.root);
  const auto known = plans_.find(key);
  if (known != plans_.end()) return known->second;
  if (plans_.size() >= kPlans) plans_.clear();
  return plans_[key] = make(call, width);
}

Program Planner::program(const Call& call, Algorithm algorithm, const Cut& cut) const {
  const std::size_t me = layout_.host, members = layout_.hosts.size();
  const std::size_t root = call.root >= 0 ? layout_.find(call.root).first : 0;
  switch (call.kind) {
    case Kind::broadcast:
      if (algorithm == Algorithm::direct) return binomial_broadcast(me, members, root, cut);
      if (algorithm == Algorithm::tree) return tree_broadcast(me, layout_.zones, root, cut);
      return chain_broadcast(me, members, root, cut);
    case Kind::reduce:
      if (algorithm == Algorithm::tree) return tree_reduce(me, layout_.zones, root, cut);
      return chain_reduce(me, members, root, cut);
    default:
      if (algorithm == Algorithm::direct) return direct_allreduce(me, members, cut);
      if (algorithm == Algorithm::tree) return tree_allreduce(me, layout_.zones, cut);
      return ring_allreduce(me, members, cut);
  }
}

std::shared_ptr<const Plan> Planner::make(const Call& call, std::size_t width) const {
  const std::size_t bytes = call.count * width;
  const Rule rule = choose_rule(rules_, call.kind, layout_.hosts.size(), bytes);
  auto plan = std::make_shared<Plan>();
  plan->algorithm = rule.algorithm;
  const std::size_t most = rule.lanes == 0 ? layout_.lanes() : std::min(rule.lanes, layout_.lanes());
  plan->lanes = std::clamp<std::size_t>(bytes / kLaneBytes, 1, most);
  const std::size_t line = std::max<std::size_t>(1, 64 / width);
  const std::size_t chunk = std::max(line, std::min(kChunk, kChunkBytes / plan->lanes) / width / line * line);
  std::size_t steps_in = 0, steps_out = 0;
  for (std::size_t lane = 0; lane < plan->lanes; ++lane) {
    const std::size_t lines = (call.count + line - 1) / line;
    const std::size_t begin = std::min(call.count, lines * lane / plan->lanes * line);
    const std::size_t end = std::min(call.count, lines * (lane + 1) / plan->lanes * line);
    plan->begins.push_back(begin);
    plan->counts.push_back(end - begin);
    Program program = this->program(call, rule.algorithm, {end - begin, chunk, line});
    std::vector<std::uint32_t> finals = program.given;
    for (const Step& step : program.steps) {
      if (step.last) finals.push_back(step.chunk);
    }
    const auto ranges = [&](const std::vector<std::uint32_t>& chunks) {
      std::vector<Range> row;
      for (const std::uint32_t c : chunks) row.push_back({program.chunks[c].begin, program.chunks[c].count});
      return row;
    };
    plan->inputs.push_back(ranges(program.input_order));
    plan->finals.push_back(ranges(finals));
    steps_in = std::max(steps_in, program.input_order.size());
    steps_out = std::max(steps_out, finals.size());
    if (lane == layout_.place) {
      plan->input_chunks = program.input_order;
      plan->final_chunks = finals;
      plan->program = std::move(program);
    }
  }
  // Lanes differ by at most a cache line, but that may add a chunk: shorter lanes get empty steps.
  for (auto& row : plan->inputs) row.resize(std::max<std::size_t>(1, steps_in), Range{0, 0});
  for (auto& row : plan->finals) row.resize(std::max<std::size_t>(1, steps_out), Range{0, 0});
  return plan;
}

}  // namespace ff::hfreduce
