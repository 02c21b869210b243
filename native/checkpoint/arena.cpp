#include "checkpoint/arena.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "base/error.hpp"
#include "base/memory/available_memory.hpp"
#include "base/process/fork_guard.hpp"
#include "base/process/worker_pool.hpp"
#include "hfreduce/device/stager.hpp"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace ff::checkpoint {
namespace {

constexpr std::size_t kRound = std::size_t{2} << 20;
constexpr std::size_t kPage = 4096;
constexpr std::size_t kShare = std::size_t{32} << 20;  // bytes that a thread populates at a time

[[noreturn]] void refuse(std::size_t bytes, int error) {
  throw_errno(
      "cannot allocate a staging arena of " + std::to_string(bytes) + " bytes; a state must fit into memory twice",
      error);
}

}  // namespace

Memory::Memory(std::size_t bytes) : size_(bytes), mapped_(bytes + kRound) {
  // The kernel would overcommit until the out-of-memory killer ends a process.
  if (bytes > available_memory()) refuse(bytes, ENOMEM);
  map_ = ::mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map_ == MAP_FAILED) refuse(bytes, errno);
  data_ = reinterpret_cast<char*>((reinterpret_cast<std::uintptr_t>(map_) + kRound - 1) / kRound * kRound);
  ::madvise(map_, mapped_, MADV_DONTFORK);
  ::madvise(data_, bytes, MADV_HUGEPAGE);  // a hint
  try {
    populate();
  } catch (...) {
    ::munmap(map_, mapped_);
    throw;
  }
}

// Uses many threads, because the kernel clears each page.
void Memory::populate() const {
  const std::size_t parts = (size_ + kShare - 1) / kShare;
  const unsigned threads = std::min(worker_pool::cores(), worker_pool::kMost);
  worker_pool::share(threads, parts, [this](std::size_t part) {
    const std::size_t start = part * kShare, end = std::min(size_, start + kShare);
    int done = 0;
    do {
      done = ::madvise(data_ + start, end - start, MADV_POPULATE_WRITE);
    } while (done != 0 && (errno == EINTR || errno == EAGAIN));
    if (done == 0) return;
    if (errno != EINVAL) refuse(size_, errno == EFAULT ? ENOMEM : errno);
    // Kernels before 5.14 lack MADV_POPULATE_WRITE.
    for (std::size_t at = start; at < end; at += kPage) static_cast<volatile char*>(data_)[at] = 0;
  });
}

Memory::~Memory() {
  // A forked child lacks these pages; other mappings of the child may lie at these addresses.
  if (process_ != fork_guard::generation()) return;
  for (const Pin& pin : pins_) {
    if (pin.ours) pin.device->unpin(data_);
  }
  ::munmap(map_, mapped_);
}

void Memory::pin(hfreduce::Device& device) const {
  const std::lock_guard lock(mutex_);
  const auto known = [&](const Pin& pin) { return pin.device == &device; };
  if (std::any_of(pins_.begin(), pins_.end(), known)) return;
  pins_.reserve(pins_.size() + 1);  // so that push_back cannot fail after a pin
  pins_.push_back({&device, device.pin(data_, size_)});
}

void Arena::reserve(std::size_t bytes) {
  const unsigned generation = fork_guard::generation();
  if (memory_ && generation_ == generation && memory_->size() >= bytes) return;
  memory_ = nullptr;  // releases the old pages before new ones are taken
  generation_ = generation;
  if (bytes > SIZE_MAX / 4) refuse(bytes, ENOMEM);
  memory_ = std::make_shared<const Memory>(std::max<std::size_t>(1, (bytes + kRound - 1) / kRound) * kRound);
}

std::shared_ptr<const Memory> Arena::memory() const {
  return memory_ && generation_ == fork_guard::generation() ? memory_ : nullptr;
}

}  // namespace ff::checkpoint
