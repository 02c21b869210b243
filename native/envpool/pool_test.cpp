// The number of threads and the size and order of batches change no trajectory; refused calls change nothing. This C++
// test exists for the builds with sanitizers.
#include "envpool/pool.hpp"

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "base/error.hpp"
#include "base/testing/check.hpp"

namespace {

using ff::envpool::Pool;

struct Batch {
  std::vector<std::int32_t> ids;
  std::vector<float> observations;
  std::vector<double> rewards;
  std::vector<std::uint8_t> terminated, truncated;

  Batch(const Pool& pool, std::size_t count)
      : ids(count),
        observations(count * static_cast<std::size_t>(pool.shape().observation)),
        rewards(count),
        terminated(count),
        truncated(count) {}
  void receive(Pool& pool) {
    pool.receive({ids, observations.data(), rewards.data(), terminated.data(), truncated.data()});
  }
};

// Returns the states of 30 environments after 100 steps each. A step is sent as soon as its environment was received.
std::vector<double> run(int threads, std::size_t batch) {
  constexpr int kCount = 30, kSteps = 100;
  const std::unique_ptr<Pool> pool = Pool::make("Acrobot-v1", kCount, threads, 5);
  std::vector<std::int32_t> all(kCount);
  std::iota(all.begin(), all.end(), 0);
  std::vector<int> taken(kCount, 0);
  pool->send(all, {});
  for (int left = kCount * (kSteps + 1); left > 0;) {
    Batch got(*pool, std::min(batch, static_cast<std::size_t>(left)));
    got.receive(*pool);
    left -= static_cast<int>(got.ids.size());
    for (const std::int32_t id : got.ids) {
      if (taken[static_cast<std::size_t>(id)]++ == kSteps) continue;
      const double action = (id + taken[static_cast<std::size_t>(id)] * 7) % 3;
      pool->send({&id, 1}, {&action, 1});
    }
  }
  std::vector<double> states(static_cast<std::size_t>(kCount * pool->shape().state));
  pool->states(states);
  return states;
}

template <class Act>
bool refused(Act act) {
  try {
    act();
  } catch (const ff::Error& error) {
    return error.code() == ff::Code::invalid;
  }
  return false;
}

}  // namespace

int main() {
  const std::vector<double> expected = run(1, 30);
  for (const int threads : {1, 2, 4}) {
    for (const std::size_t batch : {1u, 7u, 30u}) CHECK(run(threads, batch) == expected);
  }
  const std::unique_ptr<Pool> pool = Pool::make("CartPole-v1", 3, 2, 1);
  const std::int32_t ids[] = {0, 1, 1};
  const double actions[] = {0, 1, 1};
  CHECK(refused([&] { pool->send(ids, actions); }));
  CHECK(refused([&] { Batch(*pool, 1).receive(*pool); }));
  CHECK(refused([] { Pool::make("Chess-v1", 1, 1, 0); }));
  CHECK(refused([] { Pool::make("CartPole-v1", 1, 0, 0); }));
  pool->send(std::span(ids).first(2), {});
  CHECK(refused([&] { pool->seed(1); }));
  CHECK(refused([&] { Batch(*pool, 3).receive(*pool); }));
  Batch two(*pool, 2);
  two.receive(*pool);
  pool->send(std::span(ids).first(1), std::span(actions).first(1));  // the pool is destroyed while this step is queued
  return 0;
}
