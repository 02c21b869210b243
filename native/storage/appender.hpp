// Writes one new file from its begin to its end: past the page cache where the file system can, several requests under
// way, straight from the caller's memory where that and the position are aligned. A file in memory (tmpfs) is written in
// the same way, so that it is copied while the caller prepares what follows.
//
//   append(a) append(b)          requests of 1 MiB   [a0][a1][a2]   in flight, from a's memory
//                                block of our own    [a's rest, b's begin ...]  when full: a request, too
//   finish()                     the last block, padded to 4 KiB; all requests over; the file cut to its length
//
// Thread contract: one thread at a time. Errors are std::system_error; after one, only the destructor may be called.
// A forked child must not use it; its destructor there leaves the parent's requests alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "base/io_queue.hpp"

namespace ff::storage {

// Gives a queue for so many requests; for tests to replace.
using MakeQueue = std::function<std::unique_ptr<IoQueue>(unsigned entries)>;
// A ring, or threads where the kernel bars rings.
std::unique_ptr<IoQueue> make_queue(unsigned entries);

class Appender {
 public:
  static constexpr std::size_t kAlign = 4096;
  static constexpr std::size_t kRequest = std::size_t{1} << 20;
  static constexpr unsigned kDepth = 8;

  // `fd` is of an empty file that nobody else writes to, and stays the caller's. `size`: the bytes to come, if known:
  // a full place is noticed here then.
  explicit Appender(int fd, std::uint64_t size = 0, const MakeQueue& make = make_queue);
  ~Appender();  // waits for requests
  Appender(const Appender&) = delete;
  Appender& operator=(const Appender&) = delete;

  // The memory must stay valid and unchanged until it is settled().
  void append(const char* data, std::size_t bytes);
  // Afterwards the file is whole, though not durable: fsync is the caller's.
  void finish();
  // Memory of the first so many bytes may be used again.
  std::uint64_t settled() const;

 private:
  struct Slot {  // a request
    const char* data = nullptr;
    std::size_t bytes = 0;
    std::uint64_t offset = 0;
    bool busy = false;
    char* block = nullptr;  // memory of its own, made when first wanted
  };

  void reserve(std::uint64_t end);
  unsigned idle();
  void start(unsigned slot, const char* data, std::size_t bytes);
  void collect();
  void arrived(Slot& slot, std::int64_t result);
  void plain(const char* data, std::size_t bytes, std::uint64_t offset);
  void flush();
  void drain();

  const int fd_;
  std::unique_ptr<IoQueue> queue_;  // none: a disk whose file system cannot do without the page cache
  std::vector<Slot> slots_;
  int filling_ = -1;            // the slot whose block is being filled
  std::size_t filled_ = 0;      // bytes in it
  std::uint64_t position_ = 0;  // of the next request
  std::uint64_t started_ = 0;   // the page cache was told to write up to here
  std::uint64_t allocated_ = 0;
  bool allocates_ = true;
  unsigned flying_ = 0;
};

}  // namespace ff::storage
