// Reads and writes that are under way at the same time: what a ring of the kernel offers, what threads can do in its
// place, and what a test can put there.
//
// Thread contract: one thread at a time. Memory given to `read` or `write` belongs to the queue until the result was
// taken.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ff {

// For queues that keep what was added.
struct IoRequest {
  bool writes;
  int fd;
  char* memory;  // only read from where it writes
  std::size_t bytes;
  std::int64_t offset;
  std::uint64_t tag;
};

struct IoResult {
  std::uint64_t tag;
  std::int64_t bytes;  // what was read or written, or a negative error number
};

class IoQueue {
 public:
  virtual ~IoQueue() = default;

  // Adds a request; it starts with the next `submit`. REQUIRES: fewer than capacity() without a taken result.
  virtual void read(int fd, void* to, std::size_t bytes, std::int64_t offset, std::uint64_t tag) = 0;
  virtual void write(int fd, const void* from, std::size_t bytes, std::int64_t offset, std::uint64_t tag) = 0;
  // Starts what was added and waits until `wanted` results can be taken. Short of memory it may return with fewer, at
  // least one, and start the rest the next time. Throws what throw_errno does.
  virtual void submit(unsigned wanted) = 0;
  // Takes one result; false where none has arrived.
  virtual bool take(IoResult& result) = 0;
  virtual unsigned capacity() const = 0;
  // False in the copy that a forked child has of it: such a one may only be destroyed, which leaves the parent's alone.
  virtual bool own() const = 0;
};

}  // namespace ff
