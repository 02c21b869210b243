// Waiting for other processes: counters in shared memory, and the patience to wait for them.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace ff::hfreduce {

using Clock = std::chrono::steady_clock;

// A counter that processes raise and wait for. Lives in zeroed shared memory. Counters only grow; they are
// compared modulo 2^32, so that no distance of 2^31 or more may arise between writer and waiter.
struct alignas(128) Flag {
  std::atomic<std::uint32_t> value;
  std::atomic<std::uint32_t> waiters;

  bool reached(std::uint32_t target) const {
    return static_cast<std::int32_t>(value.load(std::memory_order_acquire) - target) >= 0;
  }
  void raise(std::uint32_t to);  // never lowers; publishes all writes before it; wakes waiters
  void wake();                   // wakes waiters to look around; the counter stays
};

// Opens step by step: step k when every member has arrived at it. Whoever arrives last opens, so that a waiter
// sleeps on one word, once. Lives in zeroed shared memory.
// REQUIRES: nobody arrives at step k + kWindow before step k has opened.
struct Gate {
  static constexpr std::uint32_t kWindow = 16;

  alignas(128) std::array<std::atomic<std::uint32_t>, kWindow> arrived;
  Flag opened;  // steps that are open

  // Arrives at steps [first, last). True if this opened one, and then everything before it happened before.
  bool arrive(std::uint32_t first, std::uint32_t last, std::size_t members);
  bool open(std::uint32_t step) const { return opened.reached(step + 1); }
};

// When to give up: at a time, or when told to.
struct Deadline {
  Deadline(Clock::time_point time = Clock::time_point::max(), const std::atomic<bool>* told = nullptr)
      : at(time), over(told) {}
  bool passed() const { return (over != nullptr && *over) || Clock::now() >= at; }

  Clock::time_point at;
  const std::atomic<bool>* over;
};

// How to wait: spin a little, then sleep in the kernel, and look around every now and then.
struct Patience {
  int spins = 0;  // 0 where ranks outnumber cores: the peer needs this core to arrive
  Deadline deadline;
  std::function<void()> look_around;  // throws if waiting has become pointless
};

// Returns true once the flag has reached the target, false when the deadline has passed. Throws what
// look_around throws, unless the flag has been reached meanwhile.
bool wait_for(Flag& flag, std::uint32_t target, const Patience& patience);

}  // namespace ff::hfreduce
