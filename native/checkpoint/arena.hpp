// Staging memory of a state: huge pages if the kernel has them, all populated, kept from save to save.
//
// Thread contract: an Arena is for one thread at a time. A Memory is for any number of threads, which synchronize
// their accesses to its bytes.
// Invariants
//   - The arena only grows. When it grows, its bytes are lost; a shared_ptr to the old Memory keeps the old bytes.
//   - A forked child does not get the pages, because copy-on-write would cost the parent a second set of them. The
//     child's arena is empty; `reserve` allocates a new Memory there.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "base/process/fork_guard.hpp"

namespace ff::hfreduce { class Device; }

namespace ff::checkpoint {

class Memory {
 public:
  // Throws Code::no_space, before it takes a page, if the machine or the control group lacks the memory.
  explicit Memory(std::size_t bytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  char* data() const { return data_; }
  std::size_t size() const { return size_; }
  // Pins the whole memory for the device, which must outlive this object. A second call for the same device does
  // nothing. Thread-safe. Throws Code::collective if the device reports an error.
  void pin(hfreduce::Device& device) const;

 private:
  struct Pin {
    hfreduce::Device* device;
    bool ours;  // pinned by this object, which must unpin it
  };

  void populate() const;

  const std::size_t size_;
  const unsigned process_ = fork_guard::generation();
  const std::size_t mapped_;
  void* map_ = nullptr;
  char* data_ = nullptr;  // aligned to the huge page size
  mutable std::mutex mutex_;
  mutable std::vector<Pin> pins_;  // guarded by the mutex
};

class Arena {
 public:
  // Grows to at least `bytes`, rounded up to 2 MiB. Throws Code::no_space; the arena is then empty.
  void reserve(std::size_t bytes);
  // Null before the first `reserve`, and in a forked child.
  std::shared_ptr<const Memory> memory() const;

 private:
  std::shared_ptr<const Memory> memory_;
  unsigned generation_ = 0;  // fork_guard::generation() of the process that reserved memory_
};

}  // namespace ff::checkpoint
