#include "base/process/thread_cpus.hpp"

#include <sched.h>

#include <array>
#include <atomic>
#include <cstdint>

namespace ff::thread_cpus {
namespace {

constexpr std::size_t kWords = CPU_SETSIZE / 64;
std::array<std::atomic<std::uint64_t>, kWords> chosen;  // no lock, because a forked child could inherit it locked

}  // namespace

void set(const std::vector<int>& cpus) {
  std::array<std::uint64_t, kWords> words{};
  for (const int cpu : cpus) {
    if (cpu >= 0 && cpu < CPU_SETSIZE) words[static_cast<std::size_t>(cpu) / 64] |= 1ull << (cpu % 64);
  }
  for (std::size_t i = 0; i < kWords; ++i) chosen[i] = words[i];
}

void enter() {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  for (std::size_t cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if ((chosen[cpu / 64] >> (cpu % 64) & 1) != 0) CPU_SET(cpu, &cpus);
  }
  if (CPU_COUNT(&cpus) == 0) return;
  ::sched_setaffinity(0, sizeof cpus, &cpus);  // fails, and changes nothing, if no core remains
}

}  // namespace ff::thread_cpus
