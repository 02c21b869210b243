#include "ffrecord/read/arena.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <bit>
#include <string>
#include <utility>

#include "base/error.hpp"

namespace ff::ffrecord {
namespace {

constexpr std::size_t kHuge = std::size_t{2} << 20;
std::atomic<std::size_t> all_blocks = 0;

}  // namespace

std::size_t machine_memory() {
  static const std::size_t bytes =
      static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<std::size_t>(::sysconf(_SC_PAGE_SIZE));
  return bytes;
}

void too_large(std::size_t bytes) {
  throw Error(Code::no_space, "a batch of " + std::to_string(bytes) + " bytes or more does not fit into memory (" +
                                  std::to_string(machine_memory()) + " bytes): ask for fewer samples at once");
}

Block::Block(std::size_t needed) : capacity_(std::bit_ceil(needed)) {
  void* const at =
      ::mmap(nullptr, capacity_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) too_large(needed);
  data_ = static_cast<std::uint8_t*>(at);
  all_blocks += capacity_;
  // Both calls are hints: without them the pages are small, and are populated on first touch.
  if (capacity_ >= kHuge) ::madvise(data_, capacity_, MADV_HUGEPAGE);
#ifdef MADV_POPULATE_WRITE
  ::madvise(data_, (needed + 4095) & ~std::size_t{4095}, MADV_POPULATE_WRITE);
#endif
}

Block::~Block() {
  ::munmap(data_, capacity_);
  all_blocks -= capacity_;
}

std::size_t Block::in_process() { return all_blocks; }

Arena::Arena(std::unique_ptr<Block> block, std::shared_ptr<ArenaPool> pool)
    : block_(std::move(block)), pool_(std::move(pool)) {}

Arena::Arena(std::unique_ptr<std::uint8_t[]> small) : small_(std::move(small)) {}

Arena& Arena::operator=(Arena&& other) noexcept {
  std::swap(small_, other.small_);
  std::swap(block_, other.block_);
  std::swap(pool_, other.pool_);
  return *this;
}

Arena::~Arena() {
  if (block_) pool_->give(std::move(block_));
}

Arena ArenaPool::take(std::size_t bytes) {
  if (bytes < kSmall) return Arena(std::make_unique_for_overwrite<std::uint8_t[]>(bytes));
  if (bytes > machine_memory()) too_large(bytes);
  const std::size_t wanted = std::bit_ceil(bytes);
  while (auto block = kept_.take()) {
    if (block->capacity() >= wanted && block->capacity() / 4 <= wanted) return {std::move(block), shared_from_this()};
  }
  return {std::make_unique<Block>(bytes), shared_from_this()};
}

void ArenaPool::give(std::unique_ptr<Block> block) {
  if (block->capacity() <= kKeep) kept_.give(std::move(block));
  if (closed_) kept_.clear();  // checked after give(), because close() may have come in between
}

void ArenaPool::close() {
  closed_ = true;
  kept_.clear();
}

}  // namespace ff::ffrecord
