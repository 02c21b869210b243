// Durations counted in buckets of powers of two, for metrics.
//
// Thread contract: all calls from any thread; a reading may miss durations that are added meanwhile.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace ff::fs3::io {

class Meter {
 public:
  // Bucket n counts durations from 2^(kFirst + n - 1) to below 2^(kFirst + n) ns. The first bucket also counts all
  // shorter durations, the last bucket all longer ones.
  static constexpr int kFirst = 13;
  static constexpr std::size_t kBuckets = 22;

  struct Reading {
    std::array<std::uint64_t, kBuckets> counts{};
    std::uint64_t total_ns = 0;
    void operator+=(const Reading& other) {
      for (std::size_t n = 0; n < kBuckets; ++n) counts[n] += other.counts[n];
      total_ns += other.total_ns;
    }
  };

  void add(std::chrono::nanoseconds took) {
    const auto ns = static_cast<std::uint64_t>(std::max<std::int64_t>(took.count(), 0));
    const auto at = static_cast<std::size_t>(std::bit_width(ns >> kFirst));
    counts_[std::min(at, kBuckets - 1)].fetch_add(1, std::memory_order_relaxed);
    total_ns_.fetch_add(ns, std::memory_order_relaxed);
  }

  Reading read() const {
    Reading now;
    for (std::size_t n = 0; n < kBuckets; ++n) now.counts[n] = counts_[n].load(std::memory_order_relaxed);
    now.total_ns = total_ns_.load(std::memory_order_relaxed);
    return now;
  }

 private:
  std::array<std::atomic<std::uint64_t>, kBuckets> counts_{};
  std::atomic<std::uint64_t> total_ns_ = 0;
};

}  // namespace ff::fs3::io
