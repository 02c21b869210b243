// A bounded pool of memory for bytes in flight.
//
// Thread contract: all calls from any thread. A Buffer belongs to one thread at a time. A Buffer may outlive the users
// of its Pool, but not the Pool.
#pragma once

#include <cstddef>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

namespace ff::fs3::io {

class Pool;

// Page-aligned memory that returns to its pool on destruction.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&& other) noexcept
      : pool_(std::exchange(other.pool_, nullptr)), data_(other.data_), bytes_(other.bytes_) {}
  Buffer& operator=(Buffer&& other) noexcept;
  ~Buffer() { release(); }
  explicit operator bool() const { return pool_ != nullptr; }
  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  friend class Pool;
  Buffer(Pool* pool, std::byte* data, std::size_t bytes) : pool_(pool), data_(data), bytes_(bytes) {}
  void release() noexcept;
  Pool* pool_ = nullptr;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

class Pool {
 public:
  explicit Pool(std::size_t most);  // `most`: bound in bytes
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Returns a buffer for `bytes`, or an empty Buffer if the bound would be exceeded. If no buffer is in use, `bytes`
  // may exceed the bound, so that no caller waits forever.
  Buffer take(std::size_t bytes);
  // Calls `retry` once: when a buffer is returned, from the returning thread, or at once if no buffer is in use.
  void when_free(std::function<void()> retry);
  std::size_t out() const;  // bytes of the buffers in use

 private:
  friend class Buffer;
  void give_back(std::byte* data, std::size_t bytes) noexcept;

  const std::size_t most_;
  mutable std::mutex mutex_;
  std::size_t out_ = 0;
  std::size_t kept_ = 0;  // bytes in free_; out_ + kept_ <= most_, unless a single buffer is larger
  std::vector<std::pair<std::size_t, std::byte*>> free_;
  std::vector<std::function<void()>> waiting_;
};

}  // namespace ff::fs3::io
