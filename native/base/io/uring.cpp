#include "base/io/uring.hpp"

#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>

#include "base/error.hpp"
#include "base/process/fork_guard.hpp"

namespace ff::uring {
namespace {

int answer(long result) { return result < 0 ? -errno : static_cast<int>(result); }

// Memory that is shared with the kernel and that a forked child does not inherit. A child's copy of this object must
// not unmap the range, because another mapping of the child may lie there.
class Shared {
 public:
  Shared(int fd, std::uint64_t place, std::size_t bytes) : bytes_(bytes) {
    void* const at =
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, static_cast<off_t>(place));
    if (at == MAP_FAILED) return;
    at_ = static_cast<char*>(at);
    if (::madvise(at_, bytes_, MADV_DONTFORK) != 0) unmap();
  }
  bool valid() const { return at_ != nullptr; }
  void unmap() {
    if (at_ != nullptr) ::munmap(at_, bytes_);
    at_ = nullptr;
  }
  template <class T>
  T* as(std::uint32_t offset) const {
    return reinterpret_cast<T*>(at_ + offset);
  }

 private:
  char* at_ = nullptr;
  std::size_t bytes_;
};

class Ring final : public IoQueue {
 public:
  Ring(int fd, const io_uring_params& params, Calls calls)
      : fd_(fd),
        calls_(std::move(calls)),
        generation_(fork_guard::generation()),
        capacity_(params.sq_entries),
        ring_(fd, IORING_OFF_SQ_RING,
              std::max<std::size_t>(params.sq_off.array + params.sq_entries * sizeof(unsigned),
                                    params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe))),
        entries_(fd, IORING_OFF_SQES, params.sq_entries * sizeof(io_uring_sqe)) {
    fork_guard::add(fd_);
    if (!valid()) return;
    sq_tail_ = ring_.as<unsigned>(params.sq_off.tail);
    sq_mask_ = *ring_.as<unsigned>(params.sq_off.ring_mask);
    cq_head_ = ring_.as<unsigned>(params.cq_off.head);
    cq_tail_ = ring_.as<unsigned>(params.cq_off.tail);
    cq_mask_ = *ring_.as<unsigned>(params.cq_off.ring_mask);
    cqes_ = ring_.as<io_uring_cqe>(params.cq_off.cqes);
    auto* const array = ring_.as<unsigned>(params.sq_off.array);
    for (unsigned i = 0; i < params.sq_entries; ++i) array[i] = i;
  }
  ~Ring() override {
    if (own()) {
      ring_.unmap();
      entries_.unmap();
    }
    fork_guard::close(fd_);
  }
  bool valid() const { return ring_.valid() && entries_.valid(); }
  bool own() const override { return generation_ == fork_guard::generation(); }
  unsigned capacity() const override { return capacity_; }

  void read(int fd, void* to, std::size_t bytes, std::int64_t offset, std::uint64_t tag) override {
    add(IORING_OP_READ, fd, to, bytes, offset, tag);
  }
  void write(int fd, const void* from, std::size_t bytes, std::int64_t offset, std::uint64_t tag) override {
    add(IORING_OP_WRITE, fd, from, bytes, offset, tag);
  }

  void submit(unsigned wanted) override {
    while (added_ > 0 || ready() < wanted) {
      const unsigned have = ready();
      const unsigned missing = have < wanted ? wanted - have : 0;
      const int done = calls_.enter(fd_, added_, missing, missing > 0 ? IORING_ENTER_GETEVENTS : 0);
      if (done >= 0) {
        added_ -= static_cast<unsigned>(done);
        in_flight_ += static_cast<unsigned>(done);
        continue;
      }
      if (done == -EINTR) continue;
      // The kernel lacks memory for requests, or its results must be taken first.
      if (done != -EAGAIN && done != -EBUSY) throw_errno("an io_uring takes no more requests", -done);
      if (ready() > 0) return;
      if (in_flight_ == 0) throw_errno("an io_uring takes no more requests", -done);
      calls_.enter(fd_, 0, 1, IORING_ENTER_GETEVENTS);
    }
  }

  bool take(IoResult& result) override {
    if (ready() == 0) return false;
    const unsigned head = *cq_head_;
    const io_uring_cqe& entry = cqes_[head & cq_mask_];
    result = {entry.user_data, entry.res};
    std::atomic_ref(*cq_head_).store(head + 1, std::memory_order_release);
    --in_flight_;
    return true;
  }

 private:
  void add(std::uint8_t operation, int fd, const void* memory, std::size_t bytes, std::int64_t offset,
           std::uint64_t tag) {
    const unsigned tail = *sq_tail_;  // only this process writes it
    io_uring_sqe& entry = *(entries_.as<io_uring_sqe>(0) + (tail & sq_mask_));
    entry = {};
    entry.opcode = operation;
    entry.fd = fd;
    entry.addr = reinterpret_cast<std::uintptr_t>(memory);
    entry.len = static_cast<unsigned>(bytes);
    entry.off = static_cast<std::uint64_t>(offset);
    entry.user_data = tag;
    std::atomic_ref(*sq_tail_).store(tail + 1, std::memory_order_release);
    ++added_;
  }

  unsigned ready() const { return std::atomic_ref(*cq_tail_).load(std::memory_order_acquire) - *cq_head_; }

  int fd_;
  Calls calls_;
  unsigned generation_;
  unsigned capacity_;
  Shared ring_;
  Shared entries_;
  unsigned* sq_tail_ = nullptr;
  unsigned sq_mask_ = 0;
  unsigned* cq_head_ = nullptr;
  unsigned* cq_tail_ = nullptr;
  unsigned cq_mask_ = 0;
  io_uring_cqe* cqes_ = nullptr;
  unsigned added_ = 0;      // entries that the kernel has not taken yet
  unsigned in_flight_ = 0;  // entries that the kernel has taken and whose results are not taken yet
};

}  // namespace

const Calls& kernel() {
  static const Calls calls{
      [](unsigned entries, io_uring_params* params) { return answer(::syscall(__NR_io_uring_setup, entries, params)); },
      [](int fd, unsigned submit, unsigned wanted, unsigned flags) {
        return answer(::syscall(__NR_io_uring_enter, fd, submit, wanted, flags, nullptr, 0));
      }};
  return calls;
}

std::unique_ptr<IoQueue> make(unsigned entries, const Calls& calls) {
  io_uring_params params{};
  const int fd = calls.setup(entries, &params);
  if (fd < 0) return nullptr;
  // Kernels before 5.6 have rings, but lack IORING_OP_READ and IORING_OP_WRITE. Such a kernel is recognized by the
  // lack of features that came with these operations.
  const bool able = (params.features & IORING_FEAT_SINGLE_MMAP) != 0 && (params.features & IORING_FEAT_RW_CUR_POS) != 0;
  if (!able) {
    ::close(fd);
    return nullptr;
  }
  auto ring = std::make_unique<Ring>(fd, params, calls);
  if (!ring->valid()) return nullptr;
  return ring;
}

}  // namespace ff::uring
