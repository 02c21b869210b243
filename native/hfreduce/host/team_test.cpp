// Test of the loop that drives a pass, with ranks as threads: a gate opens after the loop found it shut and before the
// loop chooses the gate to wait for.
#include "hfreduce/host/team.hpp"

#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "base/testing/check.hpp"

using namespace ff;
using namespace ff::hfreduce;

namespace {

constexpr std::uint32_t kSteps = 3 * kDepth;

// Progress of the two ranks, as step + 1.
struct Scene {
  std::atomic<std::uint32_t> asked{0};   // step for which rank 0 found the input of rank 1 missing
  std::atomic<std::uint32_t> opened{0};  // step that rank 1 has consumed, so the gate `in` of this step is open
};

void until(const std::atomic<std::uint32_t>& value, std::uint32_t at_least) {
  while (value.load() < at_least) std::this_thread::yield();
}

// Rank 1's pass: publishes a step only after rank 0 has found it missing.
class Late final : public Pass {
 public:
  explicit Late(Scene& scene) : scene_(scene) { steps = kSteps; }
  void settle() override {}
  void publish(std::uint32_t step) override { until(scene_.asked, step + 1); }
  void consume(std::uint32_t step) override { scene_.opened = step + 1; }

 private:
  Scene& scene_;
};

// Rank 0's pass: after it finds a step missing, it pauses until the step has come. Then it chooses the gate to wait for.
class LooksAway final : public Pass {
 public:
  explicit LooksAway(Scene& scene) : scene_(scene) { steps = kSteps; }
  void settle() override {}
  void publish(std::uint32_t) override {}
  void consume(std::uint32_t step) override { consumed_ = step + 1; }
  bool busy() override {
    if (consumed_ == kSteps || scene_.asked > consumed_) return false;
    scene_.asked = consumed_ + 1;
    until(scene_.opened, consumed_ + 1);
    return false;
  }

 private:
  Scene& scene_;
  std::uint32_t consumed_ = 0;
};

void a_gate_opens_between_two_looks() {
  int pair[2];
  CHECK(::socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
  const Segment control = Segment::create("test", Team::control_bytes(2));
  Scene scene;
  const auto rank = [&](std::size_t me, Pass& pass) {
    std::vector<Member> members = {{0, -1, -1}, {1, -1, -1}};
    members[1 - me].socket = pair[me];
    Team team(Segment::attach(::dup(control.fd())), members, me, true);
    const Call call{};
    team.begin(call, Clock::now() + std::chrono::seconds(20));
    team.meet({});
    team.again(pass);
    team.begin(call, Clock::now() + std::chrono::seconds(20));
    team.meet({});  // neither rank closes its socket while the other still runs
  };
  LooksAway looks_away(scene);
  Late late(scene);
  std::thread other([&] { rank(1, late); });
  rank(0, looks_away);
  other.join();
  CHECK(scene.opened == kSteps);
}

}  // namespace

int main() { a_gate_opens_between_two_looks(); }
