// A queue of concurrent reads and writes. Implementations: io_uring, threads where io_uring is missing, and fakes for
// tests.
//
// Thread contract: one thread at a time. Memory given to `read` or `write` belongs to the queue until the result is
// taken.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ff {

// A stored request, for implementations that keep the added requests.
struct IoRequest {
  bool writes;
  int fd;
  char* memory;  // a write only reads from it
  std::size_t bytes;
  std::int64_t offset;
  std::uint64_t tag;
};

struct IoResult {
  std::uint64_t tag;
  std::int64_t bytes;  // bytes read or written, or a negative error number
};

class IoQueue {
 public:
  virtual ~IoQueue() = default;

  // Adds a request; it starts with the next `submit`. REQUIRES: fewer than capacity() requests were added whose results
  // are not taken yet.
  virtual void read(int fd, void* to, std::size_t bytes, std::int64_t offset, std::uint64_t tag) = 0;
  virtual void write(int fd, const void* from, std::size_t bytes, std::int64_t offset, std::uint64_t tag) = 0;
  // Starts the added requests and waits until `wanted` results can be taken. Under memory pressure it may return with
  // fewer results (at least one), and start the remaining requests in the next call. Throws what throw_errno does.
  virtual void submit(unsigned wanted) = 0;
  // Takes one result; false if none has arrived.
  virtual bool take(IoResult& result) = 0;
  virtual unsigned capacity() const = 0;
  // Returns false in a forked child's copy. Such a copy may only be destroyed, which leaves the parent's queue alone.
  virtual bool own() const = 0;
};

// Waits for the requests in flight, whose memory is about to be freed.
inline void take_all(IoQueue& queue, std::size_t in_flight) noexcept {
  try {
    for (IoResult result; in_flight > 0;) {
      queue.submit(1);
      while (queue.take(result)) --in_flight;
    }
  } catch (...) {  // the queue has failed, so the kernel has no request of the caller
  }
}

}  // namespace ff
