// Reads the distinct samples of one batch from their files into the batch's memory, and checks each sample on arrival.
//
// Threads: each function runs on the calling thread and, until it returns, on threads of base/process/worker_pool.hpp.
// Any number of batches may be fetched at once. The functions throw Code::corrupted for a damaged sample or a truncated
// file, and Code::storage for a failed read. When a function returns or throws, none of its reads continues.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "ffrecord/read/object_cache.hpp"
#include "ffrecord/read/source.hpp"

namespace ff::ffrecord {

// One sample, and the memory that it goes to.
struct Piece {
  Extent at;
  std::uint8_t* target;
  std::int64_t sample;  // number of the sample in its file
  Source* source;
  bool done = false;

  std::int64_t end() const { return at.offset + at.bytes; }
};

// The samples of a batch without repeats: grouped by file in file order, ascending by place in a file.
struct Job {
  std::vector<Piece> pieces;
  std::int64_t bytes = 0;
  bool check = true;
  unsigned threads = 0;  // 0: automatic
};

constexpr std::int64_t kShareBytes = std::int64_t{1} << 20;  // a larger batch is shared between threads

// Reads the pieces that the page cache holds, adjacent pieces by one system call. Returns how many pieces remain.
std::size_t fetch_cached(Job& job);
// Reads the remaining pieces through the page cache, with many threads that wait for the disk.
void fetch_waiting(Job& job);
// Reads the remaining pieces through the page cache, with as many threads as copying uses.
void fetch_buffered(Job& job);
// Copies the pieces from the mapped files.
void fetch_mapped(Job& job);
// Checks each piece once per lifetime of its mapping; copies nothing.
void verify_mapped(Job& job);

// A queue of O_DIRECT reads and the memory that they fill, for one batch at a time. Unusable in a forked child.
class DirectQueue {
 public:
  static constexpr unsigned kDepth = 128;
  static constexpr std::int64_t kSlot = std::int64_t{128} << 10;

  explicit DirectQueue(std::unique_ptr<IoQueue> queue);  // throws std::bad_alloc
  ~DirectQueue();
  DirectQueue(const DirectQueue&) = delete;
  DirectQueue& operator=(const DirectQueue&) = delete;
  IoQueue& queue() { return *queue_; }
  std::uint8_t* slot(unsigned i) { return memory_ + i * kSlot; }
  bool own() const { return queue_->own(); }

 private:
  std::unique_ptr<IoQueue> queue_;
  std::uint8_t* memory_;
};

// Reads the remaining pieces with O_DIRECT, sorted and merged, kDepth reads at a time. Returns the number of pieces
// that are still not done because their file refuses O_DIRECT, or because `calls` gives no queue.
std::size_t fetch_direct(Job& job, ObjectCache<DirectQueue>& queues, const Calls& calls);

}  // namespace ff::ffrecord
