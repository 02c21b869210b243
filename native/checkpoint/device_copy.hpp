// A copy of many pieces of a device's memory into an arena, by the device, while the caller continues.
//
//   user's stream   compute | ready |                                            | waits for done, if it follows
//   lane's stream                    waits for ready | block 0, arrived = 1 | block 1, arrived = 2 | done
//
// A copy that compares with the arena's contents cannot write there directly. Its blocks go to two windows in turn, and
// a thread of the copy moves them into the arena:
//
//   lane's stream   waits for ready | block 0 to window 0 | block 1 to window 1 |                 | block 2 to window 0
//   its thread                                             | compares 0, staged = 1, issues 2 | compares 1, staged = 2
//
// Invariants
//   - Sources must stay alive and unchanged until the copy is done or its destructor has returned. With `follow`,
//     later work in the user's stream may change them.
//   - The arena's bytes between pieces do not change.
//   - Memory that the device may still write, or a callback may use, is never freed. So after a failure of the device's
//     runtime this memory is kept forever.
//   - A forked child has the object, but neither stream nor thread: there `wait` throws instead of waiting forever.
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
#include "hfreduce/device/stager.hpp"

namespace ff::checkpoint {

// A stream of one device on which copies run, one after the other.
//
// Thread contract: thread-safe. The device must outlive the lane.
class DeviceLane {
 public:
  using Device = hfreduce::Device;

  explicit DeviceLane(Device& device) : device_(device), stream_(device.make_stream()) {}
  ~DeviceLane();  // does not end work that runs in the stream
  DeviceLane(const DeviceLane&) = delete;
  DeviceLane& operator=(const DeviceLane&) = delete;

  Device& device() const { return device_; }
  Device::Stream stream() const { return stream_; }
  // Throws Code::cancelled in a forked child.
  void check_process() const;
  // Returns memory of at least `bytes`, pinned if the device can pin it. Reuses the memory that was given back last if
  // it is large enough.
  std::shared_ptr<const Memory> borrow_windows(std::size_t bytes);
  void give_back(std::shared_ptr<const Memory> windows) noexcept;

 private:
  Device& device_;
  const Device::Stream stream_;
  const unsigned generation_ = fork_guard::generation();
  std::mutex mutex_;
  std::shared_ptr<const Memory> windows_;  // given back last; null while borrowed; guarded by the mutex
};

struct DeviceCopyOptions {
  bool compare = false;  // compare with the arena's contents, see changed()
  bool follow = false;   // the user's stream waits for the copy; excludes compare
  // Bytes of a block and of a window. Large, because copies pause during the callback at a block's end.
  std::size_t block = std::size_t{16} << 20;
};

// Thread contract: all methods are thread-safe; the destructor must run after all other calls have returned.
class DeviceCopy {
 public:
  using Device = hfreduce::Device;

  // Starts the copy after the current work in the user's stream. If the memory is not pinned, the constructor may block
  // until the copy is done.
  // Throws Code::invalid if Blocks rejects the pieces or both options are set, Code::collective if the device's runtime
  // reports an error, Code::cancelled in a forked child.
  DeviceCopy(std::shared_ptr<DeviceLane> lane, std::shared_ptr<const Memory> memory, std::vector<Piece> pieces,
             Device::Stream user, const DeviceCopyOptions& options);
  // Waits for the issued blocks. Afterwards no source is accessed.
  ~DeviceCopy();
  DeviceCopy(const DeviceCopy&) = delete;
  DeviceCopy& operator=(const DeviceCopy&) = delete;

  // Waits until all pieces' bytes in [0, upto) of the arena are in place.
  // Throws Code::collective if the device has failed, Code::cancelled in a forked child.
  void wait(std::size_t upto);
  // End of the prefix of the arena that is in place; the end of the last piece when done.
  std::size_t staged() const { return blocks_.staged(in_place()); }
  bool done() const { return in_place() == blocks_.size(); }
  // True if a piece's bytes differ from the arena's previous contents. REQUIRES: compare, and the piece is in place.
  bool changed(std::size_t piece) const { return changed_[piece].load(std::memory_order_relaxed); }
  std::size_t pieces() const { return blocks_.pieces().size(); }
  bool compares() const { return options_.compare; }

 private:
  struct Progress {
    hfreduce::Flag arrived{};  // blocks that the device has copied
    hfreduce::Flag staged{};   // blocks that the copy's thread has moved into the arena; only if the copy compares
  };

  static void arrive(void* progress) noexcept;  // called by the device after each block
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
  std::size_t issued_ = 0;  // blocks issued; used by the constructor, then by the thread
  std::atomic<bool> withdrawn_ = false;
  std::atomic<bool> failed_ = false;
  std::exception_ptr error_;  // the thread's error; set before failed_
  std::thread thread_;        // only if the copy compares
};

}  // namespace ff::checkpoint
