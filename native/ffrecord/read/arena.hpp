// Memory of batches: blocks of pages that are reused, because a fresh block costs a page fault for every page.
//
// Threads: any number may take and give back at once, also in a forked child. An Arena keeps the pool alive, so an
// Arena may outlive the reader. An Arena returns its block when the last array on that block is destroyed.
//
// Bound: at most two blocks wait for reuse, none of more than kKeep bytes. A block of more than four times a batch's
// need is freed instead of reused.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "ffrecord/read/object_cache.hpp"

namespace ff::ffrecord {

// An anonymous mapping whose size in bytes is a power of two.
class Block {
 public:
  // Populates `needed` bytes at once. Throws Code::no_space.
  explicit Block(std::size_t needed);
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  std::uint8_t* data() const { return data_; }
  std::size_t capacity() const { return capacity_; }
  static std::size_t in_process();  // capacity of all existing blocks

 private:
  std::size_t capacity_;
  std::uint8_t* data_;
};

class ArenaPool;

// Returns the bytes of memory of this machine.
std::size_t machine_memory();
// Throws Code::no_space: a batch of `bytes` or more is impossible.
[[noreturn]] void too_large(std::size_t bytes);

// Memory of one batch; movable; returns its block to the pool on destruction.
class Arena {
 public:
  Arena() = default;
  Arena(std::unique_ptr<Block> block, std::shared_ptr<ArenaPool> pool);
  explicit Arena(std::unique_ptr<std::uint8_t[]> small);
  Arena(Arena&&) = default;
  Arena& operator=(Arena&& other) noexcept;
  ~Arena();
  std::uint8_t* data() const { return block_ ? block_->data() : small_.get(); }

 private:
  std::unique_ptr<std::uint8_t[]> small_;
  std::unique_ptr<Block> block_;
  std::shared_ptr<ArenaPool> pool_;
};

class ArenaPool : public std::enable_shared_from_this<ArenaPool> {
 public:
  static constexpr std::size_t kSmall = std::size_t{128} << 10;  // smaller batches use malloc
  static constexpr std::size_t kKeep = std::size_t{256} << 20;

  // Throws Code::no_space for more bytes than the machine has, or if they cannot be allocated.
  Arena take(std::size_t bytes);
  // Frees the blocks that wait for reuse. Blocks that are returned later are freed, too, because no batch will follow.
  void close();

 private:
  friend class Arena;
  void give(std::unique_ptr<Block> block);

  std::atomic<bool> closed_ = false;
  ObjectCache<Block> kept_;
};

}  // namespace ff::ffrecord
