#include "base/io/thread_queue.hpp"

#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "base/process/fork_guard.hpp"
#include "base/process/thread_cpus.hpp"

namespace ff::thread_queue {
namespace {

class Threads final : public IoQueue {
 public:
  Threads(unsigned entries, unsigned threads) : generation_(fork_guard::generation()), capacity_(entries) {
    try {
      for (unsigned i = 0; i < threads; ++i) threads_.emplace_back([this] { serve(); });
    } catch (const std::system_error& error) {
      if (threads_.empty()) throw_errno("cannot start a thread for reads and writes", error.code().value());
    }
  }
  ~Threads() override {
    if (!own()) {
      // The threads that held the lock or waited exist only in the parent.
      fork_guard::forget(mutex_);
      fork_guard::forget(wake_);
      fork_guard::forget(arrived_);
      fork_guard::forget(threads_);
      return;
    }
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  bool own() const override { return generation_ == fork_guard::generation(); }
  unsigned capacity() const override { return capacity_; }

  void read(int fd, void* to, std::size_t bytes, std::int64_t offset, std::uint64_t tag) override {
    added_.push_back({false, fd, static_cast<char*>(to), bytes, offset, tag});
  }
  void write(int fd, const void* from, std::size_t bytes, std::int64_t offset, std::uint64_t tag) override {
    added_.push_back({true, fd, const_cast<char*>(static_cast<const char*>(from)), bytes, offset, tag});
  }

  void submit(unsigned wanted) override {
    std::unique_lock lock(mutex_);
    waiting_.insert(waiting_.end(), added_.begin(), added_.end());
    added_.size() == 1 ? wake_.notify_one() : wake_.notify_all();
    added_.clear();
    arrived_.wait(lock, [&] { return results_.size() >= wanted; });
  }

  bool take(IoResult& result) override {
    const std::lock_guard lock(mutex_);
    if (results_.empty()) return false;
    result = results_.front();
    results_.pop_front();
    return true;
  }

 private:
  void serve() {
    thread_cpus::enter();
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return ended_ || !waiting_.empty(); });
      if (waiting_.empty()) return;  // a thread ends only if no submitted request waits
      const IoRequest request = waiting_.front();
      waiting_.pop_front();
      lock.unlock();
      const ssize_t done = request.writes ? ::pwrite(request.fd, request.memory, request.bytes, request.offset)
                                          : ::pread(request.fd, request.memory, request.bytes, request.offset);
      const std::int64_t result = done < 0 ? -errno : done;
      lock.lock();
      results_.push_back({request.tag, result});
      arrived_.notify_one();
    }
  }

  const unsigned generation_;
  const unsigned capacity_;
  std::vector<IoRequest> added_;  // used only by the caller's thread
  std::mutex mutex_;              // guards waiting_, results_ and ended_
  std::condition_variable wake_, arrived_;
  std::deque<IoRequest> waiting_;
  std::deque<IoResult> results_;
  bool ended_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<IoQueue> make(unsigned entries, unsigned threads) {
  return std::make_unique<Threads>(entries, threads);
}

}  // namespace ff::thread_queue
