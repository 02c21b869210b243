// Waiting for other processes: counters in shared memory, and wait policies.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace ff::hfreduce {

using Clock = std::chrono::steady_clock;

// A counter that processes raise and wait for, in zeroed shared memory. It only grows, and is compared modulo 2^32, so
// writer and waiter must be less than 2^31 apart.
struct alignas(128) Flag {
  std::atomic<std::uint32_t> value;
  std::atomic<std::uint32_t> waiters;

  bool reached(std::uint32_t target) const {
    return static_cast<std::int32_t>(value.load(std::memory_order_acquire) - target) >= 0;
  }
  void raise(std::uint32_t to);  // never lowers; publishes all writes before it; wakes waiters
  void wake();                   // wakes waiters, so that they check for failures; does not change the counter
};

// Barrier that opens step by step, in zeroed shared memory: step k opens when every member has arrived at it. The last
// member to arrive opens the gate, so that a waiter sleeps on one word, once.
// REQUIRES: no member arrives at step k + kWindow before step k has opened.
struct Gate {
  static constexpr std::uint32_t kWindow = 16;

  alignas(128) std::array<std::atomic<std::uint32_t>, kWindow> arrived;
  Flag opened;  // number of open steps

  // Arrives at steps [first, last). Returns true if this call opened at least one step. Then the writes that the other
  // members made before they arrived at that step are visible.
  bool arrive(std::uint32_t first, std::uint32_t last, std::size_t members);
  bool open(std::uint32_t step) const { return opened.reached(step + 1); }
};

// Limit of a wait: a point in time, or a flag that another thread sets.
struct Deadline {
  Deadline(Clock::time_point time = Clock::time_point::max(), const std::atomic<bool>* told = nullptr)
      : at(time), over(told) {}
  bool passed() const { return (over != nullptr && *over) || Clock::now() >= at; }

  Clock::time_point at;
  const std::atomic<bool>* over;
};

// Wait policy: spin briefly, then sleep in the kernel, and call `check_failures` every 20 ms.
struct WaitPolicy {
  int spins = 0;  // 0 if ranks outnumber cores: the peer needs this core to arrive
  Deadline deadline;
  std::function<void()> check_failures;  // throws if the flag will never reach its target
};

// Returns true once the flag has reached the target, false after the deadline. Throws what check_failures throws,
// unless the flag has reached the target meanwhile.
bool wait_for(Flag& flag, std::uint32_t target, const WaitPolicy& policy);

}  // namespace ff::hfreduce
