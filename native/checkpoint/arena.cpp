#include "checkpoint/arena.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <string>

#include "base/available_memory.hpp"
#include "base/error.hpp"
#include "base/fork_guard.hpp"
#include "base/worker_pool.hpp"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace ff::checkpoint {
namespace {

constexpr std::size_t kRound = std::size_t{2} << 20;
constexpr std::size_t kShare = std::size_t{32} << 20;  // of a thread, when making pages

[[noreturn]] void refuse(std::size_t bytes, int error) {
  throw_errno("no memory for a staging arena of " + std::to_string(bytes) +
                  " bytes; a state must fit into memory twice", error);
}

}  // namespace

Memory::Memory(std::size_t bytes) : size_(bytes) {
  // The kernel would hand out pages until something is killed for want of memory.
  if (bytes > available_memory()) refuse(bytes, ENOMEM);
  fd_ = ::memfd_create("fireflyer-staging", MFD_CLOEXEC);
  if (fd_ < 0) throw_errno("cannot create a staging arena");
  try {
    if (::ftruncate(fd_, static_cast<off_t>(bytes)) != 0) refuse(bytes, ENOMEM);
    void* const at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    if (at == MAP_FAILED) refuse(bytes, errno);
    data_ = static_cast<char*>(at);
    ::madvise(data_, bytes, MADV_HUGEPAGE);  // refused where the kernel has none for shared memory
    populate();
  } catch (...) {
    if (data_ != nullptr) ::munmap(data_, bytes);
    ::close(fd_);
    throw;
  }
}

// By many threads, since the kernel clears each page; a page that cannot be had is an error here and no SIGBUS later.
void Memory::populate() const {
  const std::size_t parts = (size_ + kShare - 1) / kShare;
  const unsigned threads = std::min(worker_pool::cores(), worker_pool::kMost);
  worker_pool::share(threads, parts, [this](std::size_t part) {
    const std::size_t start = part * kShare;
    int done = 0;
    do {
      done = ::madvise(data_ + start, std::min(kShare, size_ - start), MADV_POPULATE_WRITE);
    } while (done != 0 && (errno == EINTR || errno == EAGAIN));
    if (done == 0) return;
    // Kernels before 5.14 do not know it.
    if (errno != EINVAL) refuse(size_, errno == EFAULT ? ENOMEM : errno);
    const off_t from = static_cast<off_t>(start), length = static_cast<off_t>(std::min(kShare, size_ - start));
    if (::fallocate(fd_, 0, from, length) != 0) refuse(size_, errno);
  });
}

Memory::~Memory() {
  ::munmap(data_, size_);
  ::close(fd_);
}

void Arena::reserve(std::size_t bytes) {
  const unsigned generation = fork_guard::generation();
  if (memory_ && generation_ == generation && memory_->size() >= bytes) return;
  memory_ = nullptr;  // the old pages go before the new ones come
  generation_ = generation;
  if (bytes > SIZE_MAX / 4) refuse(bytes, ENOMEM);
  memory_ = std::make_shared<const Memory>(std::max<std::size_t>(1, (bytes + kRound - 1) / kRound) * kRound);
}

std::shared_ptr<const Memory> Arena::memory() const {
  return memory_ && generation_ == fork_guard::generation() ? memory_ : nullptr;
}

}  // namespace ff::checkpoint
