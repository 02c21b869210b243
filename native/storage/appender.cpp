#include "storage/appender.hpp"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <system_error>

#include "base/io/thread_queue.hpp"
#include "base/io/uring.hpp"

namespace ff::storage {
namespace {

constexpr unsigned kThreads = 4;
constexpr std::uint64_t kWriteBack = std::uint64_t{16} << 20;  // bytes in the page cache for which writeback is started
constexpr std::uint64_t kFirstReserve = std::uint64_t{4} << 20;  // least and most bytes that reserve() allocates ahead
constexpr std::uint64_t kMostReserve = std::uint64_t{1} << 30;

[[noreturn]] void raise(const char* what, int error = errno) {
  throw std::system_error(error, std::generic_category(), what);
}

std::uint64_t rounded(std::uint64_t bytes) {
  return (bytes + Appender::kAlign - 1) / Appender::kAlign * Appender::kAlign;
}

// Returns whether the file system has a disk, so that bypassing the page cache can pay off.
bool has_disk(int fd) {
  struct statfs info{};
  return ::fstatfs(fd, &info) == 0 && info.f_type != TMPFS_MAGIC && info.f_type != RAMFS_MAGIC;
}

bool set_direct(int fd, bool direct) {
  const int flags = ::fcntl(fd, F_GETFL);
  return flags >= 0 && ::fcntl(fd, F_SETFL, direct ? flags | O_DIRECT : flags & ~O_DIRECT) == 0;
}

}  // namespace

std::unique_ptr<IoQueue> make_queue(unsigned entries) {
  auto queue = uring::make(entries);
  return queue ? std::move(queue) : thread_queue::make(entries, std::min(entries, kThreads));
}

Appender::Appender(int fd, std::uint64_t size, const MakeQueue& make) : fd_(fd) {
  const bool disk = has_disk(fd_);
  if (disk && !set_direct(fd_, true)) return;
  allocates_ = disk;  // allocating a file in memory would touch its pages twice
  queue_ = make(kDepth);
  slots_.resize(std::min(kDepth, queue_->capacity()));
  if (size > 0) reserve(size);
}

Appender::~Appender() {
  if (queue_ && queue_->own()) {
    take_all(*queue_, in_flight_);
    for (const Slot& slot : slots_) {
      if (slot.block != nullptr) ::munmap(slot.block, kRequest);
    }
  }
}

// Allocates disk space for [0, end) and some ahead, because requests that each grow the file run one at a time. Grows
// in ever larger steps, because each allocation waits for the requests in flight.
void Appender::reserve(std::uint64_t end) {
  if (!allocates_ || end <= allocated_) return;
  const std::uint64_t ahead = std::clamp(allocated_, kFirstReserve, kMostReserve);
  for (const std::uint64_t wanted : {std::max(rounded(end), allocated_ + ahead), rounded(end)}) {
    int done = 0;
    do {
      done = ::fallocate(fd_, 0, static_cast<off_t>(allocated_), static_cast<off_t>(wanted - allocated_));
    } while (done != 0 && errno == EINTR);
    if (done == 0) {
      allocated_ = wanted;
      return;
    }
    if (errno != ENOSPC && errno != EDQUOT && errno != EFBIG) {
      allocates_ = false;  // unsupported by this file system
      return;
    }
  }
  raise("fallocate");
}

void Appender::append(const char* data, std::size_t bytes) {
  if (!queue_) {
    plain(data, bytes, position_);
    position_ += bytes;
    // Starts writeback now instead of at the caller's fsync.
    if (position_ - started_ >= kWriteBack) {
      ::sync_file_range(fd_, static_cast<off_t>(started_), static_cast<off_t>(position_ - started_),
                        SYNC_FILE_RANGE_WRITE);
      started_ = position_;
    }
    return;
  }
  while (bytes > 0) {
    std::size_t step;
    if (filled_ == 0 && bytes >= kAlign && reinterpret_cast<std::uintptr_t>(data) % kAlign == 0) {
      step = std::min(bytes / kAlign * kAlign, kRequest);
      start(idle(), data, step);
    } else {
      if (filling_ < 0) filling_ = static_cast<int>(idle());
      Slot& slot = slots_[static_cast<std::size_t>(filling_)];
      if (slot.block == nullptr) {
        void* const at = ::mmap(nullptr, kRequest, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (at == MAP_FAILED) throw std::bad_alloc();
        // A forked child does not need the block. If it shared the pages, the next write to each would copy the page.
        ::madvise(at, kRequest, MADV_DONTFORK);
        slot.block = static_cast<char*>(at);
      }
      slot.busy = true;
      slot.data = slot.block;
      step = std::min(bytes, kRequest - filled_);
      std::memcpy(slot.block + filled_, data, step);
      filled_ += step;
      if (filled_ == kRequest) flush();
    }
    data += step;
    bytes -= step;
  }
}

void Appender::finish() {
  if (!queue_) return;
  const std::uint64_t size = position_ + filled_;
  if (filled_ > 0) flush();
  drain();
  if (::ftruncate(fd_, static_cast<off_t>(size)) != 0) raise("ftruncate");
}

std::uint64_t Appender::settled() const {
  std::uint64_t first = position_;
  for (const Slot& slot : slots_) {
    if (slot.busy && slot.data != slot.block) first = std::min(first, slot.offset);
  }
  return first;
}

// Starts a write of the padded current block.
void Appender::flush() {
  const auto slot = static_cast<unsigned>(filling_);
  const std::size_t bytes = rounded(filled_);
  char* const block = slots_[slot].block;
  std::memset(block + filled_, 0, bytes - filled_);
  filling_ = -1;
  filled_ = 0;
  start(slot, block, bytes);
}

unsigned Appender::idle() {
  for (;;) {
    for (unsigned i = 0; i < slots_.size(); ++i) {
      if (!slots_[i].busy) return i;
    }
    queue_->submit(1);
    collect();
  }
}

void Appender::start(unsigned slot, const char* data, std::size_t bytes) {
  reserve(position_ + bytes);
  slots_[slot].data = data;
  slots_[slot].bytes = bytes;
  slots_[slot].offset = position_;
  slots_[slot].busy = true;
  queue_->write(fd_, data, bytes, static_cast<std::int64_t>(position_), slot);
  ++in_flight_;
  position_ += bytes;
  queue_->submit(0);
}

void Appender::collect() {
  for (IoResult result; queue_->take(result);) {
    --in_flight_;
    arrived(slots_[result.tag], result.bytes);
  }
}

void Appender::arrived(Slot& slot, std::int64_t result) {
  slot.busy = false;
  if (result == static_cast<std::int64_t>(slot.bytes)) return;
  const bool again = result >= 0 || result == -EINTR || result == -EAGAIN || result == -EINVAL || result == -EOPNOTSUPP;
  if (!again) raise("write", static_cast<int>(-result));
  // The rest of a short or refused write goes through the page cache, and so do all later requests.
  if (!set_direct(fd_, false)) raise("fcntl");
  const auto done = static_cast<std::size_t>(std::max<std::int64_t>(result, 0));
  plain(slot.data + done, slot.bytes - done, slot.offset + done);
}

void Appender::plain(const char* data, std::size_t bytes, std::uint64_t offset) {
  while (bytes > 0) {
    const ssize_t done = ::pwrite(fd_, data, std::min(bytes, std::size_t{64} << 20), static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) raise("write");
    data += done;
    bytes -= static_cast<std::size_t>(done);
    offset += static_cast<std::uint64_t>(done);
  }
}

void Appender::drain() {
  while (in_flight_ > 0) {
    queue_->submit(1);
    collect();
  }
}

}  // namespace ff::storage
