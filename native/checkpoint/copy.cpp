#include "checkpoint/copy.hpp"

#include <sched.h>

#include <algorithm>
#include <system_error>

#include "base/error.hpp"
#include "base/memory/stream_copy.hpp"
#include "base/process/fork_guard.hpp"
#include "base/process/thread_cpus.hpp"
#include "base/process/worker_pool.hpp"

namespace ff::checkpoint {
namespace {

// Largest block of a background copy: its thread may be preempted inside a block, and waiters wait for that block.
constexpr std::size_t kIdleBlock = std::size_t{256} << 10;

CopyOptions settled(CopyOptions options) {
  if (options.threads == 0) options.threads = worker_pool::cores();
  options.threads = std::min(options.threads, worker_pool::kMost);
  if (options.background) options.block = std::min(options.block, kIdleBlock);
  return options;
}

}  // namespace

Copy::Copy(std::shared_ptr<const Memory> memory, std::vector<Piece> pieces, const CopyOptions& options)
    : memory_(std::move(memory)),
      options_(settled(options)),
      generation_(fork_guard::generation()),
      blocks_(std::move(pieces), memory_ ? memory_->size() : 0, options_.block),
      ready_(blocks_.size()) {
  if (options_.compare) changed_ = std::make_unique<std::atomic<bool>[]>(this->pieces());
  if (blocks_.size() > 0)
    start_threads(options_.background ? 1 : std::max(2u, options_.threads) - 1, options_.background);
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

// REQUIRES: the mutex is held, or no other thread has the object yet. If a thread cannot be started, the copy uses
// fewer threads; without any thread, this call copies everything.
void Copy::start_threads(unsigned threads, bool idle) {
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
    ::sched_setscheduler(0, SCHED_IDLE, &none);  // for this thread; if it fails, the thread runs at normal priority
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
  blocks_.each_part(block,
                    [this](std::size_t piece, std::size_t skip, std::size_t bytes) { copy_part(piece, skip, bytes); });
  stream_fence();
}

void Copy::copy_part(std::size_t piece, std::size_t skip, std::size_t bytes) {
  char* const to = memory_->data() + blocks_.pieces()[piece].offset + skip;
  const char* const from = blocks_.pieces()[piece].source + skip;
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
    throw Error(Code::cancelled, "this copy into a staging arena belongs to the parent process");
  const std::size_t target = blocks_.needed(upto);
  if (help && next_.load(std::memory_order_relaxed) < target) {
    if (options_.background) {
      const std::lock_guard lock(mutex_);
      if (threads_.size() < options_.threads)
        start_threads(options_.threads - static_cast<unsigned>(threads_.size()), false);
    }
    while (next_.load(std::memory_order_relaxed) < target && copy_next()) {
    }
  }
  std::unique_lock lock(mutex_);
  reached_.wait(lock, [&] { return prefix_.load(std::memory_order_relaxed) >= target; });
}

}  // namespace ff::checkpoint
