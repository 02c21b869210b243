// A device for tests: its memory is plain memory, its streams are threads with delays.
//
// Order, events and callbacks behave as CUDA documents them; in particular, waiting for an event that is not recorded
// yet ends at once. A test plays the user: it makes streams, puts copies into them as its computation, and may stop a
// stream temporarily.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "hfreduce/device/stager.hpp"

namespace ff::hfreduce {

class FakeDevice : public Device {
 public:
  // `delay` passes before each command of a stream.
  explicit FakeDevice(std::chrono::microseconds delay = {});
  // REQUIRES: no stream is stopped or held. All work in the streams runs to its end.
  ~FakeDevice() override;

  Stream make_stream() override;
  void drop_stream(Stream stream) noexcept override;
  void record(Event event, Stream stream) override;
  void wait(Stream stream, Event event) override;
  void to_host(Stream stream, char* host, const char* device, std::size_t bytes) override;
  void to_device(Stream stream, char* device, const char* host, std::size_t bytes) override;
  void call(Stream stream, void (*function)(void*), void* argument) override;
  void hold(Stream stream, Flag& gate, std::uint32_t target) override;
  void probe(Stream stream) override;
  bool pin(char* data, std::size_t bytes) override;
  void unpin(char* data) noexcept override;

  // Calls that a test makes as the user of the device.
  void copy(Stream stream, char* to, const char* from, std::size_t bytes);
  void stop(Stream stream);  // stops the stream before its next command, until go_on()
  void go_on(Stream stream);
  void synchronize(Stream stream);  // blocks until all queued commands have run
  // All commands that have run, in order, as "stream command": "2 to_host 4096".
  std::vector<std::string> history() const;
  std::size_t pinned_bytes() const;
  std::size_t live_events() const;

 protected:
  Event make_event() override;
  void drop_event(Event event) noexcept override;

 private:
  struct Command {
    std::string name;
    std::function<void()> run;
  };
  struct Queue {
    std::deque<Command> commands;
    bool stopped = false, busy = false;
    std::thread thread;
  };
  struct State {  // of an event: number of its last queued record(), and of its last record() that has run
    std::uint64_t recorded = 0, reached = 0;
  };

  void put(Stream stream, Command command);
  void work(Stream stream, Queue& queue);

  const std::chrono::microseconds delay_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Stream, Queue> queues_;  // entries are never erased; guarded by mutex_, as are all members below
  std::map<Event, State> events_;
  std::map<char*, std::size_t> pinned_;
  std::vector<std::string> history_;
  std::uintptr_t last_handle_ = 0;
  bool closing_ = false;
};

}  // namespace ff::hfreduce
