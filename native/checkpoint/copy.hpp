// A copy of many pieces of memory into an arena, by threads of the copy, while the caller continues.
//
//   arena   | block 0 | block 1 | block 2 | ...      copied in this order, by the copy's threads and waiting callers
//           |<-- staged: in place --->|
//
// Thread contract: all methods are thread-safe; the destructor must run after all other calls have returned.
// Invariants
//   - Sources must stay alive and unchanged until done() returns true or the destructor returns.
//   - The arena's bytes between pieces do not change.
//   - A forked child has the object, but not its threads: there `wait` throws instead of waiting forever.
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
  unsigned threads = 0;     // includes the waiting thread; 0: one for each core, at most worker_pool::kMost
  bool compare = false;     // compare with the arena's contents, see changed()
  bool background = false;  // one thread that runs only on idle cores, until a waiting caller helps
  std::size_t block = std::size_t{1} << 20;  // bytes
};

class Copy {
 public:
  // Throws Code::invalid if Blocks rejects the pieces.
  Copy(std::shared_ptr<const Memory> memory, std::vector<Piece> pieces, const CopyOptions& options);
  // Skips blocks that have not begun and waits for the others. Afterwards no source is accessed.
  ~Copy();
  Copy(const Copy&) = delete;
  Copy& operator=(const Copy&) = delete;

  // Waits until all pieces' bytes in [0, upto) of the arena are in place; if `help`, the caller copies, too.
  // Throws Code::cancelled in a forked child.
  void wait(std::size_t upto, bool help);
  // End of the prefix of the arena that is in place; the end of the last piece when done.
  std::size_t staged() const { return blocks_.staged(prefix_.load(std::memory_order_acquire)); }
  bool done() const { return prefix_.load(std::memory_order_acquire) == blocks_.size(); }
  // Number of leading pieces that are in place.
  std::size_t pieces_done() const { return blocks_.pieces_done(prefix_.load(std::memory_order_acquire)); }
  // True if a piece's bytes differ from the arena's previous contents. REQUIRES: compare, and the piece is in place.
  bool changed(std::size_t piece) const { return changed_[piece].load(std::memory_order_relaxed); }
  std::size_t pieces() const { return blocks_.pieces().size(); }
  bool compares() const { return options_.compare; }

 private:
  void start_threads(unsigned threads, bool idle);
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
  std::atomic<std::size_t> next_ = 0;    // next block to copy
  std::atomic<std::size_t> prefix_ = 0;  // number of leading blocks in place
  std::atomic<bool> withdrawn_ = false;
  std::mutex mutex_;
  std::condition_variable reached_;
  std::vector<bool> ready_;  // blocks in place; guarded by mutex_, as is threads_
  std::vector<std::thread> threads_;
};

}  // namespace ff::checkpoint
