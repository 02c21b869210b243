#include "ffrecord/arena.hpp"

#include <sys/mman.h>

#include <bit>
#include <new>
#include <utility>

namespace ff::ffrecord {
namespace {

constexpr std::size_t kHuge = std::size_t{2} << 20;
std::atomic<std::size_t> all_blocks = 0;

std::size_t round_up(std::size_t bytes) {
  if (bytes > std::size_t{1} << 62) throw std::bad_alloc();
  return std::bit_ceil(bytes);
}

}  // namespace

Block::Block(std::size_t needed) : capacity_(round_up(needed)) {
  void* const at = ::mmap(nullptr, capacity_, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<std::uint8_t*>(at);
  all_blocks += capacity_;
  // Both are wishes: without them the pages are small, and come as they are touched.
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
  const std::size_t wanted = round_up(bytes);
  while (auto block = kept_.take()) {
    if (block->capacity() >= wanted && block->capacity() / 4 <= wanted) return {std::move(block), shared_from_this()};
  }
  return {std::make_unique<Block>(bytes), shared_from_this()};
}

void ArenaPool::give(std::unique_ptr<Block> block) {
  if (block->capacity() <= kKeep) kept_.give(std::move(block));
  if (closed_) kept_.clear();  // asked afterwards: close() may have come in between
}

void ArenaPool::close() {
  closed_ = true;
  kept_.clear();
}

}  // namespace ff::ffrecord
