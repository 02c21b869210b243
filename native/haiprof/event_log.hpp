// Events of one profiling session, as the words sent to the profiler. The caller serialises all calls (the GIL).
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ff::haiprof {

// A word is `time << 17 | label << 9 | thread << 5 | phase << 1 | begin`, as in fireflyer/haiprof/events.py.
class EventLog {
 public:
  static constexpr int kCodeBits = 17;
  static constexpr std::size_t kMostThreads = 15;

  // Reserves address space for `most` words, so that `put` never fails. Pages take memory only once they hold words.
  explicit EventLog(std::size_t most) : most_(most) {
    words_.reserve(most);
    threads_.reserve(kMostThreads);
  }

  static std::uint64_t code(bool begin, unsigned phase, unsigned label) {
    return static_cast<std::uint64_t>(begin) | phase << 1 | label << 9;
  }

  // Adds an event. If the log is full, drops and counts it. `code` has no thread number.
  void put(std::int64_t time, std::uint64_t code, std::uint64_t thread) noexcept {
    if (words_.size() >= most_) {
      ++dropped_;
      return;
    }
    words_.push_back(static_cast<std::uint64_t>(time) << kCodeBits | code | slot(thread) << 5);
  }

  // Records that a thread is inside an outermost call, or has left it. Threads that share a number never count as
  // inside.
  void enter(std::uint64_t thread, bool inside) noexcept {
    if (const std::uint64_t number = slot(thread); number < kMostThreads) inside_[number] = inside;
  }
  bool inside(std::uint64_t thread) noexcept { return inside_[slot(thread)]; }

  const std::vector<std::uint64_t>& words() const { return words_; }
  void clear() { words_.clear(); }
  std::uint64_t dropped() const { return dropped_; }

 private:
  // Threads after the first fifteen share the last number.
  std::uint64_t slot(std::uint64_t thread) noexcept {
    if (thread == last_thread_ && !threads_.empty()) return last_slot_;
    const auto found = std::find(threads_.begin(), threads_.end(), thread);
    const auto number = static_cast<std::uint64_t>(found - threads_.begin());
    if (found == threads_.end() && threads_.size() < kMostThreads) threads_.push_back(thread);
    last_thread_ = thread;
    last_slot_ = number;
    return number;
  }

  std::size_t most_;
  std::vector<std::uint64_t> words_;
  std::vector<std::uint64_t> threads_;
  std::array<bool, kMostThreads + 1> inside_{};
  std::uint64_t last_thread_ = 0;
  std::uint64_t last_slot_ = 0;
  std::uint64_t dropped_ = 0;
};

}  // namespace ff::haiprof
