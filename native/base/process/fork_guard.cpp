#include "base/process/fork_guard.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "base/error.hpp"

namespace ff::fork_guard {
namespace {

constexpr std::size_t kBits = 64;
constexpr std::size_t kWords = (1u << 20) / kBits;

// One bit per descriptor. The words are plain atomics, because the child's handler may neither lock nor allocate.
std::atomic<std::uint64_t> words[kWords];
std::atomic<std::size_t> words_used = 0;
std::atomic<unsigned> forks = 0;
int null_fd = -1;

void close_in_child() {
  forks.fetch_add(1, std::memory_order_relaxed);
  for (std::size_t w = 0; w < words_used.load(std::memory_order_relaxed); ++w) {
    std::uint64_t bits = words[w].exchange(0, std::memory_order_relaxed);
    for (; bits != 0; bits &= bits - 1) {
      const auto bit = static_cast<std::size_t>(__builtin_ctzll(bits));
      ::dup3(null_fd, static_cast<int>(w * kBits + bit), O_CLOEXEC);
    }
  }
}

void prepare() {
  static std::once_flag once;
  std::call_once(once, [] {
    null_fd = ::open("/dev/null", O_RDWR | O_CLOEXEC);
    if (null_fd < 0) throw_errno("cannot open /dev/null");
    if (const int error = ::pthread_atfork(nullptr, nullptr, close_in_child); error != 0) {
      throw_errno("cannot register a fork handler", error);
    }
  });
}

std::uint64_t mask(int fd) { return std::uint64_t{1} << (static_cast<std::size_t>(fd) % kBits); }

}  // namespace

void add(int fd) {
  prepare();
  const std::size_t word = static_cast<std::size_t>(fd) / kBits;
  if (fd < 0 || word >= kWords) throw_errno("descriptor " + std::to_string(fd), ENOSPC);
  std::size_t used = words_used.load();
  while (used <= word && !words_used.compare_exchange_weak(used, word + 1)) {
  }
  words[word].fetch_or(mask(fd));
}

void remove(int fd) {
  const std::size_t word = static_cast<std::size_t>(fd) / kBits;
  if (fd >= 0 && word < kWords) words[word].fetch_and(~mask(fd));
}

void close(int fd) {
  remove(fd);
  ::close(fd);
}

unsigned generation() {
  prepare();
  return forks.load(std::memory_order_relaxed);
}

}  // namespace ff::fork_guard
