// Random schedules of whole exchanges: M members over a simulated network that delays, splits and reorders (never
// within a pair and direction); members that stall, die or call something else. Every run ends with the right result
// and the same bits on all members, or with a typed error on every survivor.
//
// FF_SCHEDULES (default 2000) is the number of runs; run k is always the same.
#include "hfreduce/schedule/exchange.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <string>

#include "base/error.hpp"
#include "base/testing/check.hpp"
#include "base/testing/one_thread.hpp"
#include "hfreduce/transport/simulated_network.hpp"

using namespace ff;
using namespace ff::hfreduce;

namespace {

using Random = std::mt19937_64;

struct Header {
  std::uint64_t seq, count;
  bool operator==(const Header&) const = default;
};

// --- The calls ---

struct Case {
  std::string name;
  std::function<Program(std::size_t me, std::size_t count)> build;
  bool everybody;  // every member's result depends on every member
};

// One call, on all members.
struct Plan {
  Case algorithm;
  std::size_t count;
  DType dtype;
  Op op;
  Codec codec;
  double scale;
  bool exact;  // the inputs are whole numbers, and no step rounds
};

Case random_case(std::size_t members, Random& random) {
  const Cut kind{0, 1 + random() % 40, std::size_t{1} << random() % 4};
  std::vector<std::uint32_t> zones(members);
  for (auto& zone : zones) zone = static_cast<std::uint32_t>(random() % 3);
  const std::size_t root = random() % members;
  const auto cut = [=](std::size_t count) { return Cut{count, kind.chunk, kind.align}; };
  const auto blocks = [=](std::size_t count) {
    std::vector<Chunk> result;
    for (std::size_t b = 0; b < members; ++b) {
      result.push_back({count * b / members, count * (b + 1) / members - count * b / members});
    }
    return result;
  };
  const std::vector<Case> cases = {
      {"ring", [=](auto me, auto n) { return ring_allreduce(me, members, cut(n)); }, true},
      {"ring reduce_scatter", [=](auto me, auto n) { return ring_reduce_scatter(me, blocks(n), cut(n)); }, false},
      {"ring all_gather", [=](auto me, auto n) { return ring_all_gather(me, blocks(n), cut(n)); }, false},
      {"chain broadcast", [=](auto me, auto n) { return chain_broadcast(me, members, root, cut(n)); }, false},
      {"chain reduce", [=](auto me, auto n) { return chain_reduce(me, members, root, cut(n)); }, false},
      {"tree", [=](auto me, auto n) { return tree_allreduce(me, zones, cut(n)); }, true},
      {"tree reduce", [=](auto me, auto n) { return tree_reduce(me, zones, root, cut(n)); }, false},
      {"tree broadcast", [=](auto me, auto n) { return tree_broadcast(me, zones, root, cut(n)); }, false},
      {"direct", [=](auto me, auto n) { return direct_allreduce(me, members, cut(n)); }, true},
      {"binomial broadcast", [=](auto me, auto n) { return binomial_broadcast(me, members, root, cut(n)); }, false},
  };
  return cases[random() % cases.size()];
}

Plan random_plan(std::size_t members, Random& random) {
  Plan plan{.algorithm = {},
            .count = random() % 200,
            .dtype = DType::f32,
            .op = Op::sum,
            .codec = Codec::none,
            .scale = 1,
            .exact = random() % 3 != 0};
  plan.algorithm = random_case(members, random);
  constexpr DType kTypes[] = {DType::f32, DType::f64, DType::bf16, DType::i32};
  plan.dtype = kTypes[random() % (plan.exact ? 4 : 3)];
  if (plan.dtype == DType::i32) {
    plan.op = random() % 2 == 0 ? Op::sum : Op::min;
  } else {
    plan.scale = random() % 2 == 0 ? 1 : 0.5;
    if (plan.dtype != DType::f64) plan.codec = static_cast<Codec>(random() % 5);
    if (plan.codec == Codec::int8) plan.exact = false;
  }
  return plan;
}

// --- Values ---

double load(DType dtype, const char* at) {
  float f;
  std::uint32_t bits;
  std::uint16_t half;
  std::int32_t i;
  double d;
  switch (dtype) {
    case DType::f64: std::memcpy(&d, at, 8); return d;
    case DType::i32: std::memcpy(&i, at, 4); return i;
    case DType::bf16:
      std::memcpy(&half, at, 2);
      bits = std::uint32_t{half} << 16;
      std::memcpy(&f, &bits, 4);
      return static_cast<double>(f);
    default: std::memcpy(&f, at, 4); return static_cast<double>(f);
  }
}

// REQUIRES: bf16 can hold the value.
void store(DType dtype, char* at, double value) {
  const auto f = static_cast<float>(value);
  const auto i = static_cast<std::int32_t>(value);
  switch (dtype) {
    case DType::f64: std::memcpy(at, &value, 8); break;
    case DType::i32: std::memcpy(at, &i, 4); break;
    case DType::bf16: std::memcpy(at, reinterpret_cast<const char*>(&f) + 2, 2); break;
    default: std::memcpy(at, &f, 4);
  }
}

// Returns the tolerated error of an element per rounding, as a share of the sum.
double rounding(const Plan& plan) {
  double share = plan.dtype == DType::bf16 ? 1.0 / 128 : 1e-6;
  if (plan.codec == Codec::bf16) share += 1.0 / 128;
  if (plan.codec == Codec::fp16) share += 1.0 / 1024;
  return share;
}

// --- One run ---

class Run {
 public:
  explicit Run(std::uint64_t seed) : random_(seed), members_(1 + random_() % 9), network_(members_, random_) {
    const std::size_t calls = 1 + random_() % 2;
    for (std::size_t k = 0; k < calls; ++k) plans_.push_back(random_plan(members_, random_));
    for (std::size_t m = 0; m < members_; ++m) {
      ranks_.push_back(network_.rank_of(m));
      state_.push_back(std::make_unique<Member>());
    }
    const std::size_t trouble = random_() % 4;
    if (members_ > 1 && trouble == 0) crash_at_ = random_() % 300;
    if (members_ > 1 && trouble == 1) odd_ = random_() % members_;
    odd_call_ = random_() % calls;
    fill();
    for (std::size_t m = 0; m < members_; ++m) begin(m);
  }

  void run() {
    for (std::size_t events = 0; !over() && events < 3000; ++events) {
      if (events == crash_at_) crash(random_() % members_);
      random_event();
    }
    for (int still = 0; !over();) {
      still = sweep() ? 0 : still + 1;
      if (still == 50) tell(), still = 0;  // a simulated call may move nothing by chance
    }
    judge();
  }

 private:
  struct Member {
    std::vector<std::vector<char>> memory;  // of each call
    std::vector<std::vector<float>> residual;
    std::size_t call = 0;  // the current call
    Program program;
    Header header{};
    std::size_t provided = 0;
    std::uint64_t sent_before = 0;
    Scratch scratch;
    std::unique_ptr<Exchange> exchange;
    std::vector<std::map<std::size_t, std::vector<char>>> finals;  // of each call: begin -> bytes
    std::optional<Error> error;
    bool dead = false;

    bool over(std::size_t calls) const { return dead || error || call == calls; }
  };

  void fill() {
    for (std::size_t k = 0; k < plans_.size(); ++k) {
      const Plan& plan = plans_[k];
      for (std::size_t m = 0; m < members_; ++m) {
        const auto& state = state_[m];
        const std::size_t more = m == odd_ && k == odd_call_ ? 1 + random_() % 50 : 0;
        const std::size_t count = plan.count + more;
        std::vector<char> memory(count * size_of(plan.dtype));
        for (std::size_t i = 0; i < count; ++i) {
          const double whole = static_cast<double>(random_() % 15) - 7;
          const double some = plan.exact ? whole : std::ldexp(whole, static_cast<int>(random_() % 8) - 4);
          store(plan.dtype, memory.data() + i * size_of(plan.dtype), some);
        }
        state->memory.push_back(memory);
        state->residual.emplace_back(count);
        state->finals.emplace_back();
      }
      inputs_.emplace_back();
      for (auto& state : state_) inputs_[k].push_back(state->memory[k]);
    }
  }

  void begin(std::size_t m) {
    Member& state = *state_[m];
    if (state.call == plans_.size()) return;
    const Plan& plan = plans_[state.call];
    const std::size_t count = state.memory[state.call].size() / size_of(plan.dtype);
    state.program = plan.algorithm.build(m, count);
    state.provided = 0;
    state.header = {state.call, count};
    state.sent_before = network_.transport(m).bytes_sent();
    Data data{.base = state.memory[state.call].data(),
              .dtype = plan.dtype,
              .op = plan.op,
              .scale = plan.scale,
              .codec = plan.codec,
              .residual = nullptr,
              .seed = m};
    if (!plan.exact && random_() % 2 == 0) data.residual = state.residual[state.call].data();
    const Header& mine = state.header;
    Handshake handshake{&mine, sizeof mine, [&mine](int rank, const void* theirs) {
                          if (std::memcmp(&mine, theirs, sizeof mine) == 0) return;
                          throw Error(Code::collective, "disagrees: rank " + std::to_string(rank));
                        }};
    const Exchange::Limits limits{1 + random_() % 4, 1 + random_() % 4, 1 + random_() % 3};
    state.exchange = std::make_unique<Exchange>(state.program, ranks_, network_.transport(m), state.scratch, data,
                                                std::move(handshake), limits);
  }

  bool provide(std::size_t m) {
    Member& state = *state_[m];
    if (state.over(plans_.size()) || state.provided == state.program.input_order.size()) return false;
    state.exchange->provide(state.program.input_order[state.provided++]);
    return true;
  }

  bool advance(std::size_t m) {
    Member& state = *state_[m];
    if (state.over(plans_.size())) return false;
    bool moved = true;
    try {
      moved = state.exchange->advance();
      take_finals(state);
      if (state.exchange->finished()) end_call(m);
    } catch (const Error& error) {
      CHECK(error.code() == Code::rank_failed || error.code() == Code::collective);
      state.error = error;
      failed_ = true;
    }
    return moved;
  }

  void take_finals(Member& state) {
    const std::size_t width = size_of(plans_[state.call].dtype);
    while (const auto chunk = state.exchange->pop_final()) {
      const auto [begin, count] = state.program.chunks[*chunk];
      const char* at = state.memory[state.call].data() + begin * width;
      const auto [place, added] = state.finals[state.call].insert({begin, {at, at + count * width}});
      CHECK(added);
    }
  }

  void end_call(std::size_t m) {
    Member& state = *state_[m];
    const Plan& plan = plans_[state.call];
    std::uint64_t bytes = 0;
    std::vector<bool> handshake_sent(members_);
    for (const Step& step : state.program.steps) {
      if (step.kind != Step::Kind::send) continue;
      bytes += simd::encoded_bytes(plan.codec, plan.dtype, state.program.chunks[step.chunk].count);
      if (!handshake_sent[step.peer]) bytes += sizeof(Header);
      handshake_sent[step.peer] = true;
    }
    CHECK(network_.transport(m).bytes_sent() - state.sent_before == bytes);
    CHECK(network_.transport(m).idle());
    CHECK(state.exchange->waiting_for() == -1);
    state.exchange.reset();
    ++state.call;
    begin(m);
  }

  void crash(std::size_t m) {
    if (state_[m]->over(plans_.size())) return;
    state_[m]->dead = failed_ = true;
    dead_rank_ = ranks_[m];
    network_.kill(m);
  }

  void random_event() {
    const std::size_t m = random_() % members_;
    switch (random_() % 8) {
      case 0:
      case 1: provide(m); break;
      case 2: network_.deliver(random_() % (members_ * members_)); break;
      case 3:
        if (failed_ && random_() % 20 == 0) network_.tell(m, dead_rank_);
        break;
      default: advance(m);
    }
    if (random_() % 3 != 0) network_.deliver(random_() % (members_ * members_));
  }

  // Lets every member and every link do what it can, once. Returns false if nothing moved.
  bool sweep() {
    bool moved = false;
    for (std::size_t m = 0; m < members_; ++m) moved |= provide(m);
    for (std::size_t link = 0; link < members_ * members_; ++link) moved |= network_.deliver(link);
    for (std::size_t m = 0; m < members_; ++m) moved |= advance(m);
    return moved;
  }

  // Called when nothing moves. Either a member failed, and now the watch notifies all members. Or members that disagree
  // about the call wait for each other, and now their timeout passes.
  void tell() {
    CHECK(failed_ || odd_ < members_);
    for (std::size_t m = 0; m < members_; ++m) network_.tell(m, dead_rank_);
  }

  bool over() const {
    return std::all_of(state_.begin(), state_.end(), [&](const auto& state) { return state->over(plans_.size()); });
  }

  void judge() const {
    bool any_error = false;
    for (std::size_t m = 0; m < members_; ++m) any_error |= state_[m]->error.has_value();
    if (crash_at_ == kNever) CHECK(any_error == (odd_ < members_));
    for (std::size_t k = 0; k < plans_.size(); ++k) {
      std::map<std::size_t, std::vector<char>> bits;
      for (std::size_t m = 0; m < members_; ++m) {
        const Member& state = *state_[m];
        if (state.call <= k) continue;
        if (odd_ < members_ && k == odd_call_) {
          // No member can have finished a call that needs all members. The odd member's outcome has no expectation.
          CHECK(!plans_[k].algorithm.everybody || plans_[k].count == 0);
          if (m == odd_) continue;
        }
        for (const auto& [begin, bytes] : state.finals[k]) {
          judge_chunk(k, m, begin, bytes);
          CHECK(bits.insert({begin, bytes}).first->second == bytes);
        }
        if (plans_[k].algorithm.everybody) CHECK(covered(state.finals[k]) == state.memory[k].size());
      }
    }
  }

  static std::size_t covered(const std::map<std::size_t, std::vector<char>>& finals) {
    std::size_t bytes = 0;
    for (const auto& [begin, chunk] : finals) bytes += chunk.size();
    return bytes;
  }

  // Compares the chunk with sums in double of the members' initial values.
  void judge_chunk(std::size_t k, std::size_t m, std::size_t begin, const std::vector<char>& bytes) const {
    const Plan& plan = plans_[k];
    const std::size_t width = size_of(plan.dtype);
    // A final chunk is not written again.
    CHECK(std::memcmp(state_[m]->memory[k].data() + begin * width, bytes.data(), bytes.size()) == 0);
    const std::string& name = plan.algorithm.name;
    const bool adds = name.find("broadcast") == std::string::npos && name != "ring all_gather";
    const std::size_t only = adds ? members_ : origin(plan, begin);
    double greatest = 0;  // upper bound of the chunk's partial sums
    for (std::size_t i = 0; i < bytes.size() / width; ++i) {
      double weight = 0;
      for (std::size_t from = 0; from < members_; ++from) {
        weight += std::fabs(load(plan.dtype, inputs_[k][from].data() + (begin + i) * width));
      }
      greatest = std::max(greatest, weight);
    }
    for (std::size_t i = 0; i < bytes.size() / width; ++i) {
      double wanted = plan.op == Op::min ? 1e9 : 0, weight = 0;
      for (std::size_t from = 0; from < members_; ++from) {
        if (!adds && from != only) continue;
        const double value = load(plan.dtype, inputs_[k][from].data() + (begin + i) * width);
        wanted = plan.op == Op::min ? std::min(wanted, value) : wanted + value;
        weight += std::fabs(value);
      }
      wanted *= plan.scale;
      const double got = load(plan.dtype, bytes.data() + i * width);
      if (plan.exact) {
        CHECK(got == wanted);
      } else if (plan.codec == Codec::int8) {
        CHECK(std::fabs(got - wanted) <= 1.5 * static_cast<double>(members_ + 1) * greatest / 127);
      } else {
        CHECK(std::fabs(got - wanted) <= 2 * static_cast<double>(members_) * rounding(plan) * weight);
      }
    }
  }

  // Returns the member whose input is the value of a broadcast or gathered chunk.
  std::size_t origin(const Plan& plan, std::size_t begin) const {
    for (std::size_t from = 0; from < members_; ++from) {
      const Program program = plan.algorithm.build(from, plan.count);
      for (const std::uint32_t chunk : program.given) {
        if (program.chunks[chunk].begin == begin) return from;
      }
    }
    return members_;
  }

  static constexpr std::size_t kNever = SIZE_MAX;

  Random random_;
  std::size_t members_;
  SimulatedNetwork network_;
  std::vector<Plan> plans_;
  std::vector<int> ranks_;
  std::vector<std::vector<std::vector<char>>> inputs_;  // [call][member]
  std::vector<std::unique_ptr<Member>> state_;
  // crash_at_: event at which a member dies. odd_: member that passes a different count, in call odd_call_.
  std::size_t crash_at_ = kNever, odd_ = kNever, odd_call_ = 0;
  bool failed_ = false;
  int dead_rank_ = -1;
};

}  // namespace

int main() {
  const char* wanted = std::getenv("FF_SCHEDULES");
  const std::uint64_t runs = wanted == nullptr ? 2000 : std::strtoull(wanted, nullptr, 10);
  for (std::uint64_t seed = 0; seed < runs; ++seed) Run(seed).run();
  return 0;
}
