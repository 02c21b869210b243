// The memory that batches are read into: blocks of pages that are used again, since a fresh one costs a page fault for
// every page.
//
// Threads: any number may take and give back at once, also in a forked child. An Arena keeps the pool alive: it
// outlives the reader and goes back when the last array on it dies.
//
// Bound: at most two blocks wait for their next batch, none of more than kKeep bytes; one of more than four times what
// a batch needs is freed instead of being used for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "ffrecord/kept.hpp"

namespace ff::ffrecord {

// Pages of their own, a power of two.
class Block {
 public:
  // Makes `needed` bytes present at once. Throws Code::no_space.
  explicit Block(std::size_t needed);
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  std::uint8_t* data() const { return data_; }
  std::size_t capacity() const { return capacity_; }
  static std::size_t in_process();  // capacity of all blocks there are

 private:
  std::size_t capacity_;
  std::uint8_t* data_;
};

class ArenaPool;

// Bytes of memory of this machine.
std::size_t machine_memory();
// Throws Code::no_space: a batch that takes `bytes` or more cannot be.
[[noreturn]] void too_large(std::size_t bytes);

// Memory of one batch; moves, and returns to its pool when it dies.
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
  static constexpr std::size_t kSmall = std::size_t{128} << 10;  // less is plain memory: many of them may live on
  static constexpr std::size_t kKeep = std::size_t{256} << 20;

  // Throws Code::no_space for more bytes than the machine has memory, or where they cannot be had.
  Arena take(std::size_t bytes);
  // Frees what waits, now and from now on: no batch will come.
  void close();

 private:
  friend class Arena;
  void give(std::unique_ptr<Block> block);

  std::atomic<bool> closed_ = false;
  Kept<Block> kept_;
};

}  // namespace ff::ffrecord
