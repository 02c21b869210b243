#include "checkpoint/copy.hpp"

#include <sched.h>

#include <algorithm>
#include <string>
#include <system_error>

#include "base/error.hpp"
#include "base/fork_guard.hpp"
#include "base/stream_copy.hpp"
#include "base/thread_cpus.hpp"
#include "base/worker_pool.hpp"

namespace ff::checkpoint {
namespace {

constexpr std::size_t kIdleBlock = std::size_t{256} << 10;  // what a waiter may have to wait for on busy cores

CopyOptions settled(CopyOptions options) {
  if (options.threads == 0) options.threads = worker_pool::cores();
  options.threads = std::min(options.threads, worker_pool::kMost);
  if (options.background) options.block = std::min(options.block, kIdleBlock);
  return options;
}

void check(const std::vector<Piece>& pieces, std::size_t size) {
  std::size_t end = 0;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    const bool fits = piece.offset >= end && piece.offset <= size && piece.bytes <= size - piece.offset;
    if (!fits || (piece.source == nullptr && piece.bytes > 0))
      throw Error(Code::invalid, "piece " + std::to_string(i) + " (" + std::to_string(piece.bytes) + " bytes at " +
                                     std::to_string(piece.offset) + ") does not follow the one before inside the " +
                                     std::to_string(size) + " bytes of the arena");
    end = piece.offset + piece.bytes;
  }
}

}  // namespace

Copy::Copy(std::shared_ptr<const Memory> memory, std::vector<Piece> pieces, const CopyOptions& options)
    : memory_(std::move(memory)),
      pieces_(std::move(pieces)),
      options_(settled(options)),
      generation_(fork_guard::generation()) {
  check(pieces_, memory_ ? memory_->size() : 0);
  cut();
  ready_.resize(blocks_.size());
  if (options_.compare) changed_ = std::make_unique<std::atomic<bool>[]>(pieces_.size());
  if (!blocks_.empty()) hire(options_.background ? 1 : std::max(2u, options_.threads) - 1, options_.background);
}

Copy::~Copy() {
  if (generation_ != fork_guard::generation()) {
    fork_guard::forget(mutex_);
    fork_guard::forget(reached_);
    fork_guard::forget(threads_);
    return;
  }
  withdrawn_ = true;
  for (std::thread& thread : threads_) thread.join();
}

// Blocks of about options_.block bytes, each from a place in a piece to the next block's.
void Copy::cut() {
  std::size_t filled = options_.block;  // of the block that is being cut
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    for (std::size_t skip = 0; skip < pieces_[i].bytes;) {
      if (filled == options_.block) {
        blocks_.push_back({i, skip});
        filled = 0;
      }
      const std::size_t step = std::min(options_.block - filled, pieces_[i].bytes - skip);
      skip += step;
      filled += step;
    }
  }
}

// REQUIRES: the mutex, or that nobody else has the object yet. A thread that cannot be had is done without; without
// any the work is done here.
void Copy::hire(unsigned threads, bool idle) {
  try {
    for (unsigned i = 0; i < threads; ++i) threads_.emplace_back([this, idle] { serve(idle); });
  } catch (const std::system_error&) {
    if (threads_.empty()) {
      while (copy_next()) {
      }
    }
  }
}

void Copy::serve(bool idle) {
  thread_cpus::enter();
  if (idle) {
    const sched_param none{};
    ::sched_setscheduler(0, SCHED_IDLE, &none);  // of this thread; where it is refused it runs like any other
  }
  while (copy_next()) {
  }
}

bool Copy::copy_next() {
  if (withdrawn_.load(std::memory_order_relaxed)) return false;
  if (next_.load(std::memory_order_relaxed) >= blocks_.size()) return false;
  const std::size_t block = next_.fetch_add(1, std::memory_order_relaxed);
  if (block >= blocks_.size()) return false;
  copy_block(block);
  finished(block);
  return true;
}

void Copy::copy_block(std::size_t block) {
  auto [piece, skip] = blocks_[block];
  for (std::size_t left = options_.block; left > 0 && piece < pieces_.size(); ++piece, skip = 0) {
    const std::size_t bytes = std::min(left, pieces_[piece].bytes - skip);
    copy_part(piece, skip, bytes);
    left -= bytes;
  }
  stream_fence();
}

void Copy::copy_part(std::size_t piece, std::size_t skip, std::size_t bytes) {
  char* const to = memory_->data() + pieces_[piece].offset + skip;
  const char* const from = pieces_[piece].source + skip;
  if (!options_.compare) return stream_copy(to, from, bytes);
  if (stream_update(to, from, bytes)) changed_[piece].store(true, std::memory_order_relaxed);
}

void Copy::finished(std::size_t block) {
  const std::lock_guard lock(mutex_);
  ready_[block] = true;
  std::size_t prefix = prefix_.load(std::memory_order_relaxed);
  if (block != prefix) return;
  while (prefix < ready_.size() && ready_[prefix]) ++prefix;
  prefix_.store(prefix, std::memory_order_release);
  reached_.notify_all();
}

void Copy::wait(std::size_t upto, bool help) {
  if (generation_ != fork_guard::generation())
    throw Error(Code::cancelled, "this copy into a staging arena belongs to the process that this one was forked from");
  const auto reaches = [this](const Block& block, std::size_t end) {
    return pieces_[block.piece].offset + block.skip < end;
  };
  const auto target =
      static_cast<std::size_t>(std::lower_bound(blocks_.begin(), blocks_.end(), upto, reaches) - blocks_.begin());
  if (help && next_.load(std::memory_order_relaxed) < target) {
    if (options_.background) {
      const std::lock_guard lock(mutex_);
      if (threads_.size() < options_.threads) hire(options_.threads - static_cast<unsigned>(threads_.size()), false);
    }
    while (next_.load(std::memory_order_relaxed) < target && copy_next()) {
    }
  }
  std::unique_lock lock(mutex_);
  reached_.wait(lock, [&] { return prefix_.load(std::memory_order_relaxed) >= target; });
}

std::size_t Copy::begin_of(std::size_t block) const {
  return pieces_[blocks_[block].piece].offset + blocks_[block].skip;
}

std::size_t Copy::staged() const {
  const std::size_t prefix = prefix_.load(std::memory_order_acquire);
  if (prefix < blocks_.size()) return begin_of(prefix);
  return pieces_.empty() ? 0 : pieces_.back().offset + pieces_.back().bytes;
}

std::size_t Copy::pieces_done() const {
  const std::size_t prefix = prefix_.load(std::memory_order_acquire);
  return prefix < blocks_.size() ? blocks_[prefix].piece : pieces_.size();
}

}  // namespace ff::checkpoint
