// Writes one new file sequentially: with O_DIRECT if the file system allows it, and with several requests in flight. A
// request writes straight from the caller's memory if address and file position are aligned. A file in memory (tmpfs) is
// written in the same way, so that copying overlaps with the caller's next step.
//
//   append(a) append(b)          requests of 1 MiB   [a0][a1][a2]   in flight, from a's memory
//                                own block           [a's rest, b's begin ...]  when full: a request, too
//   finish()                     the last block, padded to 4 KiB; all requests over; the file cut to its length
//
// Thread contract: one thread at a time. Errors are std::system_error; after one, only the destructor may be called. A
// forked child must not use it; its destructor there leaves the parent's requests alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "base/io/io_queue.hpp"

namespace ff::storage {

// Makes a queue for `entries` requests. Tests pass their own.
using MakeQueue = std::function<std::unique_ptr<IoQueue>(unsigned entries)>;
// Returns an io_uring, or a queue of threads if the kernel forbids io_uring.
std::unique_ptr<IoQueue> make_queue(unsigned entries);

class Appender {
 public:
  static constexpr std::size_t kAlign = 4096;
  static constexpr std::size_t kRequest = std::size_t{1} << 20;
  static constexpr unsigned kDepth = 8;

  // `fd` is an empty file without other writers; the caller owns it. `size`: number of bytes that will be appended, if
  // known; the constructor then detects a full disk.
  explicit Appender(int fd, std::uint64_t size = 0, const MakeQueue& make = make_queue);
  ~Appender();  // waits for the requests in flight
  Appender(const Appender&) = delete;
  Appender& operator=(const Appender&) = delete;

  // The memory must stay valid and unchanged until settled() covers it.
  void append(const char* data, std::size_t bytes);
  // Afterwards the file is complete, but not durable: the caller must fsync.
  void finish();
  // Returns the number of leading bytes whose memory may be reused.
  std::uint64_t settled() const;

 private:
  struct Slot {  // a request
    const char* data = nullptr;
    std::size_t bytes = 0;
    std::uint64_t offset = 0;
    bool busy = false;
    char* block = nullptr;  // the slot's own memory, allocated at first use
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
  std::unique_ptr<IoQueue> queue_;  // null: a disk whose file system needs the page cache
  std::vector<Slot> slots_;
  int filling_ = -1;            // the slot whose block is being filled
  std::size_t filled_ = 0;      // bytes in that block
  std::uint64_t position_ = 0;  // offset of the next request
  std::uint64_t started_ = 0;   // end of the range for which writeback was started
  std::uint64_t allocated_ = 0;
  bool allocates_ = true;
  unsigned in_flight_ = 0;
};

}  // namespace ff::storage
