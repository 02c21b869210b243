// Choice of the algorithm that carries a collective between hosts, and the division of its bytes among lanes and steps.
//
// Lane l joins the l-th rank of every host; it carries slice l of the tensor. All members of a team make the same plan;
// only `program` is the member's own.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#include "hfreduce/host/passes.hpp"
#include "hfreduce/schedule/program.hpp"
#include "hfreduce/types.hpp"

namespace ff::hfreduce {

enum class Algorithm : std::uint32_t { ring = 1, tree, direct, chain };

inline constexpr std::size_t kAnyBytes = SIZE_MAX;

// A row of the selection table: applies to calls of `kind` on at least `hosts` hosts and of at most `bytes` bytes.
struct Rule {
  Kind kind;
  std::size_t hosts;
  std::size_t bytes;
  Algorithm algorithm;
  std::size_t lanes;  // maximum number of lanes to use; 0: all

  bool operator==(const Rule&) const = default;
};

// Rules that are used where no other rule applies. The first applicable rule of a kind is chosen.
std::vector<Rule> default_rules();
// Returns the first of `rules` that applies, else the first default rule that applies. REQUIRES: `kind` has default
// rules.
Rule choose_rule(const std::vector<Rule>& rules, Kind kind, std::size_t hosts, std::size_t bytes);

struct Plan {
  Algorithm algorithm;
  std::size_t lanes;
  Program program;                          // of this rank's lane; empty if it has none
  std::vector<std::size_t> begins, counts;  // [lanes] slices of the tensor, in elements
  std::vector<std::vector<Range>> inputs;   // [lanes][step] in the order in which the network needs them
  std::vector<std::vector<Range>> finals;   // [lanes][step] in the order in which they become final
  std::vector<std::uint32_t> input_chunks;  // chunk of the program in each step of `inputs`
  std::vector<std::uint32_t> final_chunks;  // chunk of the program in each step of `finals`
};

// Position of this rank among the hosts.
struct Layout {
  std::vector<std::vector<int>> hosts;  // ranks of each host, in team order
  std::size_t host = 0, place = 0;      // own host, and place in its team
  std::vector<std::uint32_t> zones;     // of each host

  std::size_t lanes() const;                                 // ranks of the smallest host
  bool even() const;                                         // all hosts have equally many ranks
  std::pair<std::size_t, std::size_t> find(int rank) const;  // host of the rank, and place in its team
  int lane_mate(std::size_t host_index, std::size_t lane) const { return hosts[host_index][lane]; }
};

// Makes and caches plans, because training repeats the same calls. Thread-safe.
class Planner {
 public:
  explicit Planner(Layout layout) : layout_(std::move(layout)), rules_(default_rules()) {}

  std::shared_ptr<const Plan> plan(const Call& call, std::size_t width);
  void set_rules(std::vector<Rule> rules);
  const Layout& layout() const { return layout_; }

 private:
  std::shared_ptr<const Plan> make(const Call& call, std::size_t width) const;
  Program program(const Call& call, Algorithm algorithm, const Cut& cut) const;

  const Layout layout_;
  std::mutex mutex_;
  std::vector<Rule> rules_;
  std::map<std::tuple<Kind, std::uint64_t, std::size_t, std::int32_t>, std::shared_ptr<const Plan>> plans_;
};

}  // namespace ff::hfreduce
