#include "checkpoint/device_copy.hpp"

#include <utility>

#include "base/error.hpp"
#include "base/memory/stream_copy.hpp"
#include "base/process/thread_cpus.hpp"

namespace ff::checkpoint {
namespace {

constexpr std::size_t kWindows = 2;

hfreduce::WaitPolicy patient(std::function<void()> check_failures) {
  return {0, hfreduce::Deadline(), std::move(check_failures)};
}

// Keeps memory to which a failed device may still write.
void keep_for_ever(std::shared_ptr<const Memory> memory) {
  static std::mutex mutex;
  static auto* const kept = new std::vector<std::shared_ptr<const Memory>>;
  const std::lock_guard lock(mutex);
  kept->push_back(std::move(memory));
}

class Borrowed {
 public:
  explicit Borrowed(hfreduce::Device& device) : device_(device), event_(device.borrow_event()) {}
  ~Borrowed() { device_.give_back(event_); }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;

  // Orders all later work in `second` after the current work in `first`.
  void order(hfreduce::Device::Stream first, hfreduce::Device::Stream second) {
    device_.record(event_, first);
    device_.wait(second, event_);
  }

 private:
  hfreduce::Device& device_;
  const hfreduce::Device::Event event_;
};

}  // namespace

// ---- DeviceLane ----

DeviceLane::~DeviceLane() {
  if (generation_ == fork_guard::generation()) device_.drop_stream(stream_);
}

void DeviceLane::check_process() const {
  if (generation_ != fork_guard::generation())
    throw Error(Code::cancelled, "copies from this device belong to the parent process");
}

std::shared_ptr<const Memory> DeviceLane::borrow_windows(std::size_t bytes) {
  {
    const std::lock_guard lock(mutex_);
    if (windows_ && windows_->size() >= bytes) return std::exchange(windows_, nullptr);
  }
  auto windows = std::make_shared<const Memory>(bytes);
  try {
    windows->pin(device_);
  } catch (const Error&) {
    // Ignored: a copy to unpinned memory works, only slower. If nothing can be pinned, pinning the arena reports it.
  }
  return windows;
}

void DeviceLane::give_back(std::shared_ptr<const Memory> windows) noexcept {
  const std::lock_guard lock(mutex_);
  windows_ = std::move(windows);
}

// ---- DeviceCopy ----

DeviceCopy::DeviceCopy(std::shared_ptr<DeviceLane> lane, std::shared_ptr<const Memory> memory,
                       std::vector<Piece> pieces, Device::Stream user, const DeviceCopyOptions& options)
    : lane_(std::move(lane)),
      memory_(std::move(memory)),
      options_(options),
      blocks_(std::move(pieces), memory_ ? memory_->size() : 0, options.block) {
  if (options_.compare && options_.follow)
    throw Error(Code::invalid, "a stream cannot follow a copy that compares: the host takes part in it");
  lane_->check_process();
  if (options_.compare) changed_ = std::make_unique<std::atomic<bool>[]>(this->pieces());
  if (blocks_.size() == 0) return;
  if (options_.compare) windows_ = lane_->borrow_windows(kWindows * options_.block);
  try {
    start(user);
  } catch (...) {
    abandon();
    throw;
  }
}

DeviceCopy::~DeviceCopy() {
  if (generation_ != fork_guard::generation()) {
    fork_guard::forget(thread_);
    return;
  }
  withdrawn_ = true;
  if (thread_.joinable()) thread_.join();
  try {
    if (failed_) std::rethrow_exception(error_);
    const auto probe = [this] { lane_->device().probe(lane_->stream()); };
    wait_for(progress_->arrived, static_cast<std::uint32_t>(issued_), patient(probe));
  } catch (...) {  // the device has failed
    abandon();
  }
  if (windows_) lane_->give_back(std::move(windows_));
}

void DeviceCopy::abandon() noexcept {
  keep_for_ever(std::move(memory_));
  keep_for_ever(std::move(windows_));
}

void DeviceCopy::start(Device::Stream user) {
  Borrowed event(lane_->device());
  event.order(user, lane_->stream());
  const std::size_t first = options_.compare ? std::min(kWindows, blocks_.size()) : blocks_.size();
  while (issued_ < first) issue(issued_);
  if (options_.follow) event.order(lane_->stream(), user);
  if (options_.compare) thread_ = std::thread([this] { compare(); });
}

// A stream's callbacks run one after the other. Each callback shares ownership of the progress, because the copy may be
// destroyed before the callback returns.
void DeviceCopy::arrive(void* progress) noexcept {
  const std::unique_ptr<std::shared_ptr<Progress>> owned(static_cast<std::shared_ptr<Progress>*>(progress));
  hfreduce::Flag& arrived = (*owned)->arrived;
  arrived.raise(arrived.value.load(std::memory_order_relaxed) + 1);
}

char* DeviceCopy::window(std::size_t block) const { return windows_->data() + block % kWindows * options_.block; }

void DeviceCopy::issue(std::size_t block) {
  Device& device = lane_->device();
  char* at = options_.compare ? window(block) : nullptr;
  blocks_.each_part(block, [&](std::size_t piece, std::size_t skip, std::size_t bytes) {
    const Piece& from = blocks_.pieces()[piece];
    char* const to = at != nullptr ? at : memory_->data() + from.offset + skip;
    device.to_host(lane_->stream(), to, from.source + skip, bytes);
    if (at != nullptr) at += bytes;
  });
  auto progress = std::make_unique<std::shared_ptr<Progress>>(progress_);
  device.call(lane_->stream(), &DeviceCopy::arrive, progress.get());
  static_cast<void>(progress.release());
  ++issued_;
}

void DeviceCopy::update(std::size_t block) {
  const char* at = window(block);
  blocks_.each_part(block, [&](std::size_t piece, std::size_t skip, std::size_t bytes) {
    char* const to = memory_->data() + blocks_.pieces()[piece].offset + skip;
    if (stream_update(to, at, bytes)) changed_[piece].store(true, std::memory_order_relaxed);
    at += bytes;
  });
  stream_fence();
}

void DeviceCopy::compare() noexcept {
  thread_cpus::enter();
  const auto probe = [this] { lane_->device().probe(lane_->stream()); };
  try {
    for (std::size_t block = 0; block < blocks_.size() && !withdrawn_; ++block) {
      const auto number = static_cast<std::uint32_t>(block + 1);
      wait_for(progress_->arrived, number, patient(probe));
      update(block);
      if (issued_ < blocks_.size()) issue(issued_);
      progress_->staged.raise(number);
    }
  } catch (...) {
    error_ = std::current_exception();
    failed_ = true;
    progress_->staged.wake();
  }
}

void DeviceCopy::wait(std::size_t upto) {
  lane_->check_process();
  const auto target = static_cast<std::uint32_t>(blocks_.needed(upto));
  wait_for(flag(), target, patient([this] {
             if (failed_) std::rethrow_exception(error_);
             if (!options_.compare) lane_->device().probe(lane_->stream());
           }));
}

}  // namespace ff::checkpoint
