// The memory that a state is staged in: huge pages where the kernel has them, all present, kept from save to save.
//
// Thread contract: one thread at a time; the Memory may be used by any number, its bytes are theirs to order.
// Invariants
//   - It only grows. When it does, the bytes are lost; who still holds the old Memory keeps that alive.
//   - A forked child does not get the pages, since copying on write would cost the parent a second set of them; its
//     copy of an arena is empty: `reserve` makes a new one there.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "base/fork_guard.hpp"

namespace ff::hfreduce {
class Device;
}

namespace ff::checkpoint {

class Memory {
 public:
  // Throws Code::no_space, without a page taken, where the machine or the control group has not that much to give.
  explicit Memory(std::size_t bytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  char* data() const { return data_; }
  std::size_t size() const { return size_; }
  // Makes all of it known to the device, which must outlive it; the second call for a device does nothing. Any thread.
  // Throws Code::collective where the device refuses.
  void pin(hfreduce::Device& device) const;

 private:
  struct Pin {
    hfreduce::Device* device;
    bool ours;  // to unpin
  };

  void populate() const;

  const std::size_t size_;
  const unsigned process_ = fork_guard::generation();
  const std::size_t mapped_;
  void* map_ = nullptr;
  char* data_ = nullptr;  // at a multiple of the huge page
  mutable std::mutex mutex_;
  mutable std::vector<Pin> pins_;  // guarded by the mutex
};

class Arena {
 public:
  // At least `bytes`, rounded up to 2 MiB. Throws Code::no_space; the arena is empty then.
  void reserve(std::size_t bytes);
  // Null before the first `reserve`, and in a forked child.
  std::shared_ptr<const Memory> memory() const;

 private:
  std::shared_ptr<const Memory> memory_;
  unsigned generation_ = 0;  // of the process that made it
};

}  // namespace ff::checkpoint
