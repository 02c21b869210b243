#include "hfreduce/host/waiting.hpp"

#include <immintrin.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace ff::hfreduce {
namespace {

constexpr long kCheckIntervalNs = 20'000'000;  // interval at which a sleeping waiter calls check_failures

std::uint32_t* word(std::atomic<std::uint32_t>& value) {
  static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t));
  return reinterpret_cast<std::uint32_t*>(&value);
}

}  // namespace

void Flag::raise(std::uint32_t to) {
  std::uint32_t seen = value.load(std::memory_order_relaxed);
  do {  // another thread may have raised the flag to a later step
    if (static_cast<std::int32_t>(seen - to) >= 0) return;
  } while (!value.compare_exchange_weak(seen, to, std::memory_order_seq_cst));
  if (waiters.load(std::memory_order_seq_cst) != 0) wake();
}

void Flag::wake() { ::syscall(SYS_futex, word(value), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

bool Gate::arrive(std::uint32_t first, std::uint32_t last, std::size_t members) {
  std::uint32_t open_to = first;
  for (std::uint32_t step = first; step != last; ++step) {
    std::atomic<std::uint32_t>& count = arrived[step % kWindow];
    if (count.fetch_add(1, std::memory_order_acq_rel) + 1 != members) continue;
    count.store(0, std::memory_order_relaxed);  // for step + kWindow; raise() below publishes this store
    open_to = step + 1;
  }
  if (open_to == first) return false;
  opened.raise(open_to);
  return true;
}

bool wait_for(Flag& flag, std::uint32_t target, const WaitPolicy& policy) {
  for (int i = 0; i < policy.spins; ++i) {
    if (flag.reached(target)) return true;
    _mm_pause();
  }
  while (!flag.reached(target)) {
    flag.waiters.fetch_add(1, std::memory_order_seq_cst);
    const std::uint32_t seen = flag.value.load(std::memory_order_seq_cst);
    if (static_cast<std::int32_t>(seen - target) < 0) {
      const timespec interval{0, kCheckIntervalNs};
      ::syscall(SYS_futex, word(flag.value), FUTEX_WAIT, seen, &interval, nullptr, 0);
    }
    flag.waiters.fetch_sub(1, std::memory_order_seq_cst);
    if (flag.reached(target)) break;
    if (policy.deadline.passed()) return false;
    try {
      policy.check_failures();
    } catch (...) {
      // A peer may raise its flag and leave at once; the raised value still counts.
      if (flag.reached(target)) return true;
      throw;
    }
  }
  return true;
}

}  // namespace ff::hfreduce
