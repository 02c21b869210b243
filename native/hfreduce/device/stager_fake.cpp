#include "hfreduce/device/stager_fake.hpp"

#include <algorithm>
#include <cstring>

namespace ff::hfreduce {

FakeDevice::FakeDevice(std::chrono::microseconds delay) : delay_(delay) {}

FakeDevice::~FakeDevice() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
    changed_.notify_all();
  }
  for (auto& [stream, queue] : queues_) queue.thread.join();
  close();
}

Device::Stream FakeDevice::make_stream() {
  const std::lock_guard lock(mutex_);
  const Stream stream = ++last_handle_;
  Queue& queue = queues_[stream];
  queue.thread = std::thread(&FakeDevice::work, this, stream, std::ref(queue));
  return stream;
}

void FakeDevice::drop_stream(Stream) noexcept {}  // its thread ends with the device

void FakeDevice::work(Stream stream, Queue& queue) {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return !queue.stopped && (closing_ || !queue.commands.empty()); });
    if (queue.commands.empty()) return;
    const Command command = std::move(queue.commands.front());
    queue.commands.pop_front();
    queue.busy = true;
    lock.unlock();
    if (delay_.count() > 0) std::this_thread::sleep_for(delay_);
    command.run();
    lock.lock();
    history_.push_back(std::to_string(stream) + " " + command.name);
    queue.busy = false;
    changed_.notify_all();
  }
}

void FakeDevice::put(Stream stream, Command command) {
  const std::lock_guard lock(mutex_);
  const auto found = queues_.find(stream);
  if (found == queues_.end()) {
    throw Error(Code::collective, "the fake device has no stream " + std::to_string(stream));
  }
  found->second.commands.push_back(std::move(command));
  changed_.notify_all();
}

void FakeDevice::record(Event event, Stream stream) {
  std::uint64_t number;
  {
    const std::lock_guard lock(mutex_);
    number = ++events_.at(event).recorded;
  }
  put(stream, {"record", [this, event, number] {
                 const std::lock_guard lock(mutex_);
                 State& state = events_.at(event);
                 state.reached = std::max(state.reached, number);
                 changed_.notify_all();
               }});
}

void FakeDevice::wait(Stream stream, Event event) {
  std::uint64_t number;
  {
    const std::lock_guard lock(mutex_);
    number = events_.at(event).recorded;
  }
  put(stream, {"wait", [this, event, number] {
                 std::unique_lock lock(mutex_);
                 changed_.wait(lock, [&] { return events_.at(event).reached >= number; });
               }});
}

void FakeDevice::to_host(Stream stream, char* host, const char* device, std::size_t bytes) {
  put(stream, {"to_host " + std::to_string(bytes), [=] { std::memcpy(host, device, bytes); }});
}

void FakeDevice::to_device(Stream stream, char* device, const char* host, std::size_t bytes) {
  put(stream, {"to_device " + std::to_string(bytes), [=] { std::memcpy(device, host, bytes); }});
}

void FakeDevice::call(Stream stream, void (*function)(void*), void* argument) {
  put(stream, {"call", [=] { function(argument); }});
}

void FakeDevice::hold(Stream stream, Flag& gate, std::uint32_t target) {
  {
    const std::lock_guard lock(mutex_);
    auto* const address = reinterpret_cast<char*>(&gate);
    const auto after = pinned_.upper_bound(address);
    if (after == pinned_.begin() || address >= std::prev(after)->first + std::prev(after)->second) {
      throw Error(Code::collective, "a fake stream can wait for pinned memory only");
    }
  }
  put(stream, {"hold " + std::to_string(target),
               [&gate, target] { wait_for(gate, target, {0, Clock::time_point::max(), [] {}}); }});
}

void FakeDevice::probe(Stream stream) {
  const std::lock_guard lock(mutex_);
  if (!queues_.contains(stream)) {
    throw Error(Code::collective, "the fake device has no stream " + std::to_string(stream));
  }
}

void FakeDevice::copy(Stream stream, char* to, const char* from, std::size_t bytes) {
  put(stream, {"copy " + std::to_string(bytes), [=] { std::memmove(to, from, bytes); }});
}

void FakeDevice::stop(Stream stream) {
  const std::lock_guard lock(mutex_);
  queues_.at(stream).stopped = true;
}

void FakeDevice::go_on(Stream stream) {
  const std::lock_guard lock(mutex_);
  queues_.at(stream).stopped = false;
  changed_.notify_all();
}

void FakeDevice::synchronize(Stream stream) {
  std::unique_lock lock(mutex_);
  const Queue& queue = queues_.at(stream);
  changed_.wait(lock, [&] { return queue.commands.empty() && !queue.busy; });
}

std::vector<std::string> FakeDevice::history() const {
  const std::lock_guard lock(mutex_);
  return history_;
}

std::size_t FakeDevice::pinned_bytes() const {
  const std::lock_guard lock(mutex_);
  std::size_t total = 0;
  for (const auto& [data, bytes] : pinned_) total += bytes;
  return total;
}

std::size_t FakeDevice::live_events() const {
  const std::lock_guard lock(mutex_);
  return events_.size();
}

Device::Event FakeDevice::make_event() {
  const std::lock_guard lock(mutex_);
  events_.emplace(++last_handle_, State{});
  return last_handle_;
}

void FakeDevice::drop_event(Event event) noexcept {
  const std::lock_guard lock(mutex_);
  events_.erase(event);
}

bool FakeDevice::pin(char* data, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  return pinned_.emplace(data, bytes).second;
}

void FakeDevice::unpin(char* data) noexcept {
  const std::lock_guard lock(mutex_);
  pinned_.erase(data);
}

}  // namespace ff::hfreduce
