#include "hfreduce/host/shared_result.hpp"

#include <atomic>
#include <mutex>
#include <vector>

#include "hfreduce/engine/arena.hpp"

namespace ff::hfreduce {
namespace {

std::atomic<std::uint32_t>& holders_of(char* block) { return *reinterpret_cast<std::atomic<std::uint32_t>*>(block); }

// Blocks of this process that other ranks still hold.
struct Retired {
  std::mutex mutex;
  std::vector<char*> blocks;

  void sweep() {
    const std::lock_guard lock(mutex);
    std::erase_if(blocks, [](char* block) {
      if (holders_of(block).load(std::memory_order_acquire) != 0) return false;
      Arena::of_process().release(block);
      return true;
    });
  }
};

Retired& retired() {
  static Retired* all = new Retired;  // never destroyed: results may outlive static destructors
  return *all;
}

}  // namespace

std::shared_ptr<SharedResult> SharedResult::allocate(std::size_t bytes, std::size_t holders) {
  retired().sweep();
  char* block = Arena::of_process().allocate(kHead + bytes);
  holders_of(block).store(static_cast<std::uint32_t>(holders), std::memory_order_release);
  return std::shared_ptr<SharedResult>(new SharedResult(block, bytes, nullptr));
}

std::shared_ptr<SharedResult> SharedResult::attach(const Place& place, std::size_t bytes,
                                                   std::shared_ptr<Segment> memory) {
  char* block = memory->data() + place.offset - kHead;
  return std::shared_ptr<SharedResult>(new SharedResult(block, bytes, std::move(memory)));
}

Place SharedResult::place() const {
  const auto found = Arena::of_process().find(block_, kHead + bytes_);
  return {found->segment, found->offset + kHead};
}

SharedResult::~SharedResult() {
  const bool last = holders_of(block_).fetch_sub(1, std::memory_order_acq_rel) == 1;
  if (memory_ != nullptr) return;
  if (last) {
    Arena::of_process().release(block_);
    return;
  }
  const std::lock_guard lock(retired().mutex);
  retired().blocks.push_back(block_);
}

}  // namespace ff::hfreduce
