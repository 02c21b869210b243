// A copy of many pieces of a device's memory into an arena, by the device, while the caller goes on.
//
//   user's stream   compute | ready |                                            | waits for done, if it follows
//   lane's stream                    waits for ready | block 0, arrived = 1 | block 1, arrived = 2 | done
//
// A copy that compares with what the arena holds cannot go there at once. Its blocks go to two windows, by turns, and
// a thread of its own brings them into the arena:
//
//   lane's stream   waits for ready | block 0 to window 0 | block 1 to window 1 |                 | block 2 to window 0
//   its thread                                             | compares 0, staged = 1, issues 2 | compares 1, staged = 2
//
// Invariants
//   - Sources must stay as they are, and alive, until the copy is done or its destructor has returned; who follows
//     with the stream in which they change may change them there at once.
//   - The arena's bytes between pieces are left as they are.
//   - What the device may still write, or call, is never freed: after a failure of its runtime it is kept for ever.
//   - A forked child has the object, but neither stream nor thread: there `wait` throws instead of waiting for ever.
#pragma once

#include <atomic>
#include <cstddef>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "checkpoint/arena.hpp"
#include "checkpoint/blocks.hpp"
#include "hfreduce/stager.hpp"

namespace ff::checkpoint {

// A stream of one device on which copies run, one after the other.
//
// Thread contract: any thread. The device must outlive it.
class DeviceLane {
 public:
  using Device = hfreduce::Device;

  explicit DeviceLane(Device& device) : device_(device), stream_(device.make_stream()) {}
  ~DeviceLane();  // what is in the stream still runs
  DeviceLane(const DeviceLane&) = delete;
  DeviceLane& operator=(const DeviceLane&) = delete;

  Device& device() const { return device_; }
  Device::Stream stream() const { return stream_; }
  // Throws Code::cancelled in a forked child.
  void check_process() const;
  // Memory of so many bytes, pinned where the device lets it; the last one that was given back, if it is large enough.
  std::shared_ptr<const Memory> borrow_windows(std::size_t bytes);
  void give_back(std::shared_ptr<const Memory> windows) noexcept;

 private:
  Device& device_;
  const Device::Stream stream_;
  const unsigned generation_ = fork_guard::generation();
  std::mutex mutex_;
  std::shared_ptr<const Memory> windows_;  // not in use; guarded by the mutex
};

struct DeviceCopyOptions {
  bool compare = false;  // with what the arena holds, see changed()
  bool follow = false;   // the user's stream waits for the copy; not with compare
  // Large, since the copies stand still while a block's end is told; windows are as large.
  std::size_t block = std::size_t{16} << 20;
};

// Thread contract: all methods may be called from any thread, also several at once; the destructor after all of them.
class DeviceCopy {
 public:
  using Device = hfreduce::Device;

  // Behind what is in the user's stream now. The memory should be pinned: else the constructor may wait for the copy.
  // Throws Code::invalid for pieces that Blocks refuses and for both options at once, Code::collective if the device's
  // runtime refuses, Code::cancelled in a forked child.
  DeviceCopy(std::shared_ptr<DeviceLane> lane, std::shared_ptr<const Memory> memory, std::vector<Piece> pieces,
             Device::Stream user, const DeviceCopyOptions& options);
  // Waits for what is in the stream: afterwards nothing touches a source.
  ~DeviceCopy();
  DeviceCopy(const DeviceCopy&) = delete;
  DeviceCopy& operator=(const DeviceCopy&) = delete;

  // Returns when all pieces' bytes in [0, upto) of the arena are in place.
  // Throws Code::collective if the device has failed, Code::cancelled in a forked child.
  void wait(std::size_t upto);
  // Where the prefix that is in place ends; the end of the last piece when done.
  std::size_t staged() const { return blocks_.staged(in_place()); }
  bool done() const { return in_place() == blocks_.size(); }
  // Whether a piece's bytes are others than the arena held before. REQUIRES: compare, and the piece is in place.
  bool changed(std::size_t piece) const { return changed_[piece].load(std::memory_order_relaxed); }
  std::size_t pieces() const { return blocks_.pieces().size(); }
  bool compares() const { return options_.compare; }

 private:
  struct Progress {
    hfreduce::Flag arrived{};  // blocks that the device has copied
    hfreduce::Flag staged{};   // of those, blocks that are in the arena; of a copy that compares
  };

  static void arrive(void* progress) noexcept;  // by the device, for each block
  void start(Device::Stream user);
  void issue(std::size_t block);
  void compare() noexcept;
  void update(std::size_t block);
  char* window(std::size_t block) const;
  hfreduce::Flag& flag() const { return options_.compare ? progress_->staged : progress_->arrived; }
  std::size_t in_place() const { return flag().value.load(std::memory_order_acquire); }
  void abandon() noexcept;

  const std::shared_ptr<DeviceLane> lane_;
  std::shared_ptr<const Memory> memory_, windows_;
  const DeviceCopyOptions options_;
  const unsigned generation_ = fork_guard::generation();
  const Blocks blocks_;
  const std::shared_ptr<Progress> progress_ = std::make_shared<Progress>();
  std::unique_ptr<std::atomic<bool>[]> changed_;
  std::size_t issued_ = 0;  // blocks; of the constructor, then of the thread
  std::atomic<bool> withdrawn_ = false;
  std::atomic<bool> failed_ = false;
  std::exception_ptr error_;  // of the thread, once it has failed
  std::thread thread_;        // of a copy that compares
};

}  // namespace ff::checkpoint
