// How the distinct samples of one batch come from their files to their places, each checked as it arrives.
//
// Threads: the functions belong to the calling thread and use others of base/worker_pool.hpp while they run. Any
// number of batches may be fetched at once. They throw Code::corrupted for a damaged sample or a file that was cut,
// Code::storage for a failing read; then no thread and no read of theirs is left behind.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "ffrecord/kept.hpp"
#include "ffrecord/source.hpp"

namespace ff::ffrecord {

// One sample, and the memory that it goes to.
struct Piece {
  Extent at;
  std::uint8_t* target;
  std::int64_t sample;  // its number in its file
  Source* source;
  bool done = false;

  std::int64_t end() const { return at.offset + at.bytes; }
};

// The samples of a batch without repeats: files in their order, places in a file ascending.
struct Job {
  std::vector<Piece> pieces;
  std::int64_t bytes = 0;
  bool check = true;
  unsigned threads = 0;  // 0: chosen here
};

constexpr std::int64_t kShareBytes = std::int64_t{1} << 20;  // a batch of more is shared between threads

// Reads what the page cache holds, neighbours with one system call; returns how many pieces are not done.
std::size_t fetch_cached(Job& job);
// Reads the pieces that are not done through the page cache, waiting for them on many threads.
void fetch_waiting(Job& job);
// The same on the threads that copying is shared between.
void fetch_buffered(Job& job);
// Copies the pieces from the mapped files.
void fetch_mapped(Job& job);
// Checks each piece once in the life of its mapping; copies nothing.
void verify_mapped(Job& job);

// A queue of reads and the memory they go to, for one batch at a time. In a forked child it is dead.
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

// Reads the pieces that are not done past the page cache, sorted and merged, kDepth reads at a time; returns how many
// are still not done, since their file cannot be read so. Without a queue from `calls` it does nothing.
std::size_t fetch_direct(Job& job, Kept<DirectQueue>& queues, const Calls& calls);

}  // namespace ff::ffrecord
