#include "base/process/worker_pool.hpp"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#include "base/process/fork_guard.hpp"
#include "base/process/thread_cpus.hpp"

namespace ff::worker_pool {
namespace {

struct Work {
  Work(std::size_t count, const std::function<void(std::size_t)>& each) : parts(count), part(each) {}

  std::size_t parts;
  const std::function<void(std::size_t)>& part;
  std::atomic<std::size_t> next = 0;
  std::atomic<bool> failed = false;
  // Guarded by the pool's mutex.
  unsigned inside = 0;
  std::exception_ptr error;
  std::condition_variable left;
};

// Never destroyed, because its threads never end.
class Pool {
 public:
  explicit Pool(unsigned generation) : generation_(generation) {}
  unsigned generation() const { return generation_; }

  void share(unsigned helpers, Work& work) {
    std::unique_lock lock(mutex_);
    start_threads(helpers);
    helpers = std::min(helpers, started_);
    for (unsigned i = 0; i < helpers; ++i) tickets_.push_back(&work);
    lock.unlock();
    for (unsigned i = 0; i < helpers; ++i) wake_.notify_one();
    const std::exception_ptr error = run(work);
    lock.lock();
    if (error && !work.error) work.error = error;
    std::erase(tickets_, &work);
    work.left.wait(lock, [&work] { return work.inside == 0; });
    if (work.error) std::rethrow_exception(work.error);
  }

 private:
  // REQUIRES: the mutex is held. Continues with fewer threads if a thread cannot be started.
  void start_threads(unsigned wanted) {
    wanted = std::min(wanted, kMost - 1);
    try {
      for (; started_ < wanted; ++started_) std::thread([this] { serve(); }).detach();
    } catch (const std::system_error&) {
    }
  }

  void serve() {
    thread_cpus::enter();
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return !tickets_.empty(); });
      Work& work = *tickets_.front();
      tickets_.pop_front();
      ++work.inside;
      lock.unlock();
      const std::exception_ptr error = run(work);
      lock.lock();
      if (error && !work.error) work.error = error;
      if (--work.inside == 0) work.left.notify_one();
    }
  }

  static std::exception_ptr run(Work& work) {
    try {
      while (!work.failed.load(std::memory_order_relaxed)) {
        const std::size_t part = work.next.fetch_add(1, std::memory_order_relaxed);
        if (part >= work.parts) break;
        work.part(part);
      }
    } catch (...) {
      work.failed = true;
      return std::current_exception();
    }
    return nullptr;
  }

  const unsigned generation_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Work*> tickets_;
  unsigned started_ = 0;
};

// Returns this process's pool. A forked child abandons its parent's pool, because the lock may be held by a thread
// that does not exist in the child.
Pool& pool() {
  static std::atomic<Pool*> current = nullptr;
  const unsigned generation = fork_guard::generation();
  Pool* found = current.load(std::memory_order_acquire);
  if (found != nullptr && found->generation() == generation) return *found;
  auto fresh = std::make_unique<Pool>(generation);
  if (current.compare_exchange_strong(found, fresh.get(), std::memory_order_acq_rel)) return *fresh.release();
  return *found;
}

}  // namespace

unsigned cores() {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  if (::sched_getaffinity(0, sizeof cpus, &cpus) != 0) return std::max(1u, std::thread::hardware_concurrency());
  return static_cast<unsigned>(std::max(1, CPU_COUNT(&cpus)));
}

void share(unsigned threads, std::size_t parts, const std::function<void(std::size_t)>& part) {
  if (threads <= 1 || parts <= 1) {
    for (std::size_t i = 0; i < parts; ++i) part(i);
    return;
  }
  Work work(parts, part);
  pool().share(static_cast<unsigned>(std::min<std::size_t>(threads, parts)) - 1, work);
}

}  // namespace ff::worker_pool
