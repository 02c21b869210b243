// A copy of many pieces of memory into an arena, by threads of its own, while the caller goes on.
//
//   arena   | block 0 | block 1 | block 2 | ...      taken in this order, by threads and by those who wait
//           |<-- staged: in place --->|
//
// Thread contract: all methods may be called from any thread, also several at once; the destructor after all of them.
// Invariants
//   - Sources and their bytes must stay as they are until done() or the destructor has returned.
//   - The arena's bytes between pieces are left as they are.
//   - A forked child has the object, but not its threads: there `wait` throws instead of waiting for ever.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "checkpoint/arena.hpp"
#include "checkpoint/blocks.hpp"

namespace ff::checkpoint {

struct CopyOptions {
  unsigned threads = 0;     // with the one that waits; 0: as many as cores, at most worker_pool::kMost
  bool compare = false;     // with what the arena holds, see changed()
  bool background = false;  // one thread that only runs on idle cores, until somebody waits and helps
  std::size_t block = std::size_t{1} << 20;
};

class Copy {
 public:
  // Throws Code::invalid for pieces that Blocks refuses.
  Copy(std::shared_ptr<const Memory> memory, std::vector<Piece> pieces, const CopyOptions& options);
  // Leaves out what has not begun and waits for the rest: afterwards nothing touches a source.
  ~Copy();
  Copy(const Copy&) = delete;
  Copy& operator=(const Copy&) = delete;

  // Returns when all pieces' bytes in [0, upto) of the arena are in place; copies itself meanwhile, if `help`.
  // Throws Code::cancelled in a forked child.
  void wait(std::size_t upto, bool help);
  // Where the prefix that is in place ends; the end of the last piece when done.
  std::size_t staged() const { return blocks_.staged(prefix_.load(std::memory_order_acquire)); }
  bool done() const { return prefix_.load(std::memory_order_acquire) == blocks_.size(); }
  // The first so many pieces are in place.
  std::size_t pieces_done() const { return blocks_.pieces_done(prefix_.load(std::memory_order_acquire)); }
  // Whether a piece's bytes are others than the arena held before. REQUIRES: compare, and the piece is in place.
  bool changed(std::size_t piece) const { return changed_[piece].load(std::memory_order_relaxed); }
  std::size_t pieces() const { return blocks_.pieces().size(); }
  bool compares() const { return options_.compare; }

 private:
  void hire(unsigned threads, bool idle);
  void serve(bool idle);
  bool copy_next();
  void copy_block(std::size_t block);
  void copy_part(std::size_t piece, std::size_t skip, std::size_t bytes);
  void finished(std::size_t block);

  const std::shared_ptr<const Memory> memory_;
  const CopyOptions options_;
  const unsigned generation_;
  const Blocks blocks_;
  std::unique_ptr<std::atomic<bool>[]> changed_;
  std::atomic<std::size_t> next_ = 0;    // the block to be taken
  std::atomic<std::size_t> prefix_ = 0;  // so many blocks are in place
  std::atomic<bool> withdrawn_ = false;
  std::mutex mutex_;
  std::condition_variable reached_;
  std::vector<bool> ready_;          // blocks in place; guarded by mutex_, as are those below
  std::vector<std::thread> threads_;
};

}  // namespace ff::checkpoint
