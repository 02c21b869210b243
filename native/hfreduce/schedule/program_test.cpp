// Simulates the programs of every builder for all members. Values are symbolic: they count how often each member's
// input was added, and how often the value was scaled.
//
// Messages move in random order, and only when sender and receiver are both ready (only a collect has a buffer). Inputs
// come one by one in input_order, and only when nothing else can move. A program that does not deadlock under these
// conditions does not deadlock with more buffers or earlier inputs.
#include <algorithm>
#include <functional>
#include <numeric>
#include <optional>
#include <random>
#include <string>

#include "base/testing/check.hpp"
#include "base/testing/one_thread.hpp"
#include "hfreduce/schedule/program.hpp"

using namespace ff::hfreduce;
using Kind = Step::Kind;

namespace {

constexpr std::size_t kMost = 17;  // members

struct Value {
  std::array<int, kMost> from{};  // by member: how often its input was added
  int scaled = 0;
  bool operator==(const Value&) const = default;
};

Value input_of(std::size_t member) {
  Value value;
  value.from[member] = 1;
  return value;
}

Value sum_of(std::size_t members) {
  Value value;
  std::fill_n(value.from.begin(), members, 1);
  value.scaled = 1;
  return value;
}

Value operator+(Value a, const Value& b) {
  CHECK(a.scaled == 0 && b.scaled == 0);
  for (std::size_t i = 0; i < kMost; ++i) a.from[i] += b.from[i];
  return a;
}

class Simulation {
 public:
  Simulation(std::vector<Program> programs, std::uint64_t seed)
      : programs_(std::move(programs)), members_(programs_.size()), random_(seed) {
    for (std::size_t m = 0; m < members_; ++m) {
      const Program& p = programs_[m];
      CHECK(p.me == m);
      Member state;
      state.values.resize(p.chunks.size(), input_of(m));
      state.final.resize(p.chunks.size());
      state.provided.resize(p.chunks.size());
      state.kept.resize(p.steps.size());
      state.finished.resize(p.steps.size());
      state.out.resize(members_), state.in.resize(members_);
      state.sends_left.resize(p.chunks.size());
      std::vector<std::int32_t> last_send(p.chunks.size(), -1);
      for (std::size_t k = 0; k < p.steps.size(); ++k) {
        const Step& step = p.steps[k];
        CHECK(step.peer < members_ && step.peer != m && step.chunk < p.chunks.size());
        CHECK(step.after < static_cast<std::int32_t>(k));
        if (step.kind == Kind::send) {
          ++state.sends_left[step.chunk];
          last_send[step.chunk] = static_cast<std::int32_t>(k);
        } else if (step.kind != Kind::collect && last_send[step.chunk] >= 0) {
          CHECK(step.after == last_send[step.chunk] && state.sends_left[step.chunk] == 1);
        }
        (step.kind == Kind::send ? state.out : state.in)[step.peer].push_back(k);
      }
      state_.push_back(std::move(state));
    }
  }

  void run() {
    for (;;) {
      if (finish_collect() || deliver_one()) continue;
      if (!provide_one()) break;
    }
    for (std::size_t m = 0; m < members_; ++m) {
      const auto& finished = state_[m].finished;
      CHECK(std::count(finished.begin(), finished.end(), true) == static_cast<std::ptrdiff_t>(finished.size()));
      CHECK(state_[m].inputs == programs_[m].input_order.size());
    }
  }

  // The final value of a chunk at a member, or nullptr.
  const Value* final(std::size_t member, std::size_t chunk) const {
    return state_[member].final[chunk] ? &state_[member].values[chunk] : nullptr;
  }

 private:
  struct Member {
    std::vector<Value> values;
    std::vector<bool> final, provided, finished;
    std::vector<std::optional<Value>> kept;         // per step: collected
    std::vector<std::size_t> waiting;               // collected, not finished
    std::vector<std::size_t> sends_left;            // per chunk: sends that are not finished
    std::vector<std::vector<std::size_t>> out, in;  // per peer: steps
    std::vector<std::size_t> sent = std::vector<std::size_t>(kMost), got = sent;
    std::size_t inputs = 0;
  };

  const Step& steps(std::size_t member, std::int32_t k) const {
    return programs_[member].steps[static_cast<std::size_t>(k)];
  }

  bool ready(std::size_t member, std::size_t k) const {
    const Step& step = programs_[member].steps[k];
    const Member& state = state_[member];
    if (step.after >= 0 && !state.finished[static_cast<std::size_t>(step.after)]) return false;
    if (step.after < 0 && step.kind != Kind::receive && !state.provided[step.chunk]) return false;
    return step.kind != Kind::collect || !step.last || state.sends_left[step.chunk] == 0;
  }

  bool deliver_one() {
    const std::size_t links = members_ * members_, first = random_() % links;
    for (std::size_t i = 0; i < links; ++i) {
      const std::size_t link = (first + i) % links;
      const std::size_t from = link / members_, to = link % members_;
      Member &a = state_[from], &b = state_[to];
      if (a.sent[to] == a.out[to].size()) continue;
      CHECK(b.got[from] < b.in[from].size());
      const std::size_t s = a.out[to][a.sent[to]], r = b.in[from][b.got[from]];
      CHECK(programs_[from].steps[s].chunk == programs_[to].steps[r].chunk);
      const bool collects = programs_[to].steps[r].kind == Kind::collect;
      const bool room = b.got[from] == 0 || b.finished[b.in[from][b.got[from] - 1]];
      if (!room || !ready(from, s) || !(collects || ready(to, r))) continue;
      ++a.sent[to], ++b.got[from];
      a.finished[s] = true;
      --a.sends_left[programs_[from].steps[s].chunk];
      const Value& value = a.values[programs_[from].steps[s].chunk];
      if (collects) b.kept[r] = value, b.waiting.push_back(r);
      else take(to, r, value);
      return true;
    }
    return false;
  }

  // Adds the collected data when the sends of the chunk are over.
  bool finish_collect() {
    for (std::size_t m = 0; m < members_; ++m) {
      auto& waiting = state_[m].waiting;
      for (std::size_t i = 0; i < waiting.size(); ++i) {
        const std::size_t k = waiting[i];
        if (!ready(m, k)) continue;
        waiting.erase(waiting.begin() + static_cast<std::ptrdiff_t>(i));
        take(m, k, *state_[m].kept[k]);
        return true;
      }
    }
    return false;
  }

  void take(std::size_t member, std::size_t k, const Value& value) {
    const Step& step = programs_[member].steps[k];
    Member& state = state_[member];
    Value& own = state.values[step.chunk];
    if (step.kind == Kind::receive) {
      own = value;
    } else if (step.kind == Kind::reduce) {
      own = own + value;
    } else if (step.last) {
      for (std::int32_t s = static_cast<std::int32_t>(k); s >= 0; s = steps(member, s).after) {
        CHECK(s == static_cast<std::int32_t>(k) || steps(member, s).peer < step.peer);
        own = own + *state.kept[static_cast<std::size_t>(s)];
      }
    }
    if (step.kind != Kind::receive) own.scaled += step.last;
    CHECK(!state.final[step.chunk]);
    state.final[step.chunk] = step.last;
    state.finished[k] = true;
  }

  bool provide_one() {
    const std::size_t first = random_() % members_;
    for (std::size_t i = 0; i < members_; ++i) {
      const std::size_t m = (first + i) % members_;
      const Program& p = programs_[m];
      if (state_[m].inputs == p.input_order.size()) continue;
      const std::uint32_t chunk = p.input_order[state_[m].inputs++];
      CHECK(!state_[m].provided[chunk]);
      state_[m].provided[chunk] = true;
      if (std::count(p.given.begin(), p.given.end(), chunk) == 1) {
        state_[m].final[chunk] = true;
        state_[m].values[chunk].scaled = 1;
      }
      return true;
    }
    return false;
  }

  std::vector<Program> programs_;
  std::size_t members_;
  std::mt19937_64 random_;
  std::vector<Member> state_;
};

using Build = std::function<Program(std::size_t me)>;
// Returns the final value that a member must have of the elements from `begin` on, or nullptr.
using Expect = std::function<const Value*(std::size_t member, std::size_t begin)>;

std::size_t sent_by(const Program& program) {
  std::size_t elements = 0;
  for (const Step& step : program.steps) {
    if (step.kind == Kind::send) elements += program.chunks[step.chunk].count;
  }
  return elements;
}

// Builds, runs and compares; returns the elements that each member sends.
std::vector<std::size_t> check(std::size_t members, const Build& build, std::size_t covered, const Expect& expect,
                               std::uint64_t seed) {
  std::vector<Program> programs;
  std::vector<std::size_t> sent;
  for (std::size_t m = 0; m < members; ++m) {
    programs.push_back(build(m));
    sent.push_back(sent_by(programs[m]));
    CHECK(programs[m].chunks.size() == programs[0].chunks.size());
  }
  std::vector<Chunk> chunks = programs[0].chunks;
  std::sort(chunks.begin(), chunks.end(), [](const Chunk& a, const Chunk& b) { return a.begin < b.begin; });
  std::size_t total = 0;
  for (std::size_t c = 0; c < chunks.size(); ++c) {
    CHECK(chunks[c].count > 0);
    CHECK(c == 0 || chunks[c].begin >= chunks[c - 1].begin + chunks[c - 1].count);
    total += chunks[c].count;
  }
  CHECK(total == covered);
  const std::vector<Chunk> cuts = programs[0].chunks;
  Simulation simulation(std::move(programs), seed);
  simulation.run();
  for (std::size_t m = 0; m < members; ++m) {
    for (std::size_t c = 0; c < cuts.size(); ++c) {
      const Value* wanted = expect(m, cuts[c].begin);
      const Value* got = simulation.final(m, c);
      CHECK((wanted == nullptr) == (got == nullptr));
      CHECK(wanted == nullptr || *wanted == *got);
    }
  }
  return sent;
}

std::size_t sum(const std::vector<std::size_t>& v) { return std::accumulate(v.begin(), v.end(), std::size_t{0}); }

void test_ring(std::size_t members, const Cut& cut, std::uint64_t seed) {
  const Value all = sum_of(members);
  const auto sent = check(
      members, [&](std::size_t me) { return ring_allreduce(me, members, cut); }, cut.count,
      [&](std::size_t, std::size_t) { return &all; }, seed);
  CHECK(sum(sent) == 2 * (members - 1) * cut.count);
  // In each half of the allreduce a member sends the chunks of all owners but one. Owners' shares differ by at most
  // `align` elements.
  const std::size_t bound = 2 * (members - 1) * cut.count / members + 2 * cut.align;
  for (const std::size_t one : sent) CHECK(one <= bound);
}

void test_blocks(std::size_t members, const Cut& cut, std::mt19937_64& random) {
  std::vector<Chunk> blocks(members);
  std::size_t begin = 0;
  for (Chunk& block : blocks) {
    block = {begin, random() % 4 == 0 ? 0 : random() % (2 * cut.count / members + 1)};
    begin += block.count + random() % 3;
  }
  std::shuffle(blocks.begin(), blocks.end(), random);
  std::size_t total = 0;
  for (const Chunk& block : blocks) total += block.count;
  const auto owner = [&](std::size_t at) {
    for (std::size_t b = 0; b < members; ++b) {
      if (at >= blocks[b].begin && at < blocks[b].begin + blocks[b].count) return b;
    }
    return members;
  };
  const Value all = sum_of(members);
  const auto reduced = check(
      members, [&](std::size_t me) { return ring_reduce_scatter(me, blocks, cut); }, total,
      [&](std::size_t m, std::size_t at) { return owner(at) == m ? &all : nullptr; }, random());
  std::vector<Value> inputs;
  for (std::size_t m = 0; m < members; ++m) {
    inputs.push_back(input_of(m));
    inputs[m].scaled = 1;
  }
  const auto gathered = check(
      members, [&](std::size_t me) { return ring_all_gather(me, blocks, cut); }, total,
      [&](std::size_t, std::size_t at) { return &inputs[owner(at)]; }, random());
  for (std::size_t m = 0; m < members; ++m) {
    CHECK(reduced[m] == total - blocks[m].count);
    CHECK(gathered[m] == total - blocks[(m + 1) % members].count);
  }
}

void test_rooted(std::size_t members, const Cut& cut, const std::vector<std::uint32_t>& zones,
                 std::mt19937_64& random) {
  const std::size_t root = random() % members;
  const Value all = sum_of(members);
  Value given = input_of(root);
  given.scaled = 1;
  const Expect at_root = [&](std::size_t m, std::size_t) { return m == root ? &all : nullptr; };
  const Expect everywhere = [&](std::size_t, std::size_t) { return &given; };
  const auto reduced = [&](const Build& build) {
    const auto sent = check(members, build, cut.count, at_root, random());
    for (std::size_t m = 0; m < members; ++m) CHECK(sent[m] == (m == root ? 0 : cut.count));
  };
  const auto broadcast = [&](const Build& build) {
    const auto sent = check(members, build, cut.count, everywhere, random());
    CHECK(sum(sent) == (members - 1) * cut.count);
    return sent;
  };
  reduced([&](std::size_t me) { return chain_reduce(me, members, root, cut); });
  reduced([&](std::size_t me) { return tree_reduce(me, zones, root, cut); });
  const auto spread = broadcast([&](std::size_t me) { return tree_broadcast(me, zones, root, cut); });
  for (const std::size_t one : spread) CHECK(one <= 3 * cut.count / 2 + cut.chunk + cut.align);
  broadcast([&](std::size_t me) { return binomial_broadcast(me, members, root, cut); });
  const auto chained = broadcast([&](std::size_t me) { return chain_broadcast(me, members, root, cut); });
  for (const std::size_t one : chained) CHECK(one <= cut.count);
}

void test_everywhere(std::size_t members, const Cut& cut, const std::vector<std::uint32_t>& zones, std::uint64_t seed) {
  const Value all = sum_of(members);
  const Expect expect = [&](std::size_t, std::size_t) { return &all; };
  const auto direct =
      check(members, [&](std::size_t me) { return direct_allreduce(me, members, cut); }, cut.count, expect, seed);
  for (const std::size_t one : direct) CHECK(one == (members - 1) * cut.count);
  const auto tree =
      check(members, [&](std::size_t me) { return tree_allreduce(me, zones, cut); }, cut.count, expect, seed);
  CHECK(sum(tree) == 2 * (members - 1) * cut.count);
  // A member sends every chunk up once. It sends half of the chunks, plus at most one, down to two children.
  for (const std::size_t one : tree) CHECK(one <= 2 * cut.count + 2 * (cut.chunk + cut.align));
}

void test_shape(const std::vector<std::uint32_t>& labels, int root) {
  const std::size_t members = labels.size();
  std::vector<std::uint32_t> distinct = labels;
  std::sort(distinct.begin(), distinct.end());
  distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
  const auto trees = double_tree(labels, root);
  for (const Tree& tree : trees) {
    std::size_t edges = 0, crossing = 0;
    for (std::size_t m = 0; m < members; ++m) {
      CHECK(tree.children[m].size() <= 2);
      for (const std::uint16_t child : tree.children[m]) {
        CHECK(tree.parent[child] == static_cast<int>(m));
        CHECK(tree.depth[child] == tree.depth[m] + 1);
        ++edges;
        crossing += labels[child] != labels[m];
      }
      CHECK((tree.parent[m] < 0) == (tree.depth[m] == 0));
    }
    CHECK(edges == members - 1 && crossing == distinct.size() - 1);
    CHECK(root < 0 || tree.parent[static_cast<std::size_t>(root)] < 0);
    if (distinct.size() == 1) {  // at most one level deeper than the flattest tree; two with a given root
      std::size_t levels = 0;
      while ((std::size_t{1} << levels) < members) ++levels;
      CHECK(tree.height <= levels + (root >= 0 ? 1 : 0));
    }
  }
  for (std::size_t m = 0; m < members; ++m) {
    const bool both = !trees[0].children[m].empty() && !trees[1].children[m].empty();
    CHECK(!both || static_cast<int>(m) == root);
  }
}

}  // namespace

int main() {
  std::mt19937_64 random(1);
  for (std::size_t members = 1; members <= kMost; ++members) {
    for (int round = 0; round < 12; ++round) {
      std::vector<std::uint32_t> zones(members);
      const std::size_t labels = round == 0 ? 1 : 1 + random() % 6;
      for (auto& zone : zones) zone = static_cast<std::uint32_t>(random() % labels * 7);
      test_shape(zones, -1);
      test_shape(zones, static_cast<int>(random() % members));
      const std::size_t count = round == 1 ? 0 : round == 2 ? 1 : random() % 300;
      const Cut cut{count, 1 + random() % 40, std::size_t{1} << random() % 4};
      test_ring(members, cut, random());
      test_blocks(members, cut, random);
      test_rooted(members, cut, zones, random);
      test_everywhere(members, cut, zones, random());
    }
  }
  return 0;
}
