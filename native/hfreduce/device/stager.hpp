// Tensors on a device: their mirrors in host memory, and the copies between the two.
//
//   user's stream    compute | ready |                                  waits for done | compute
//   inward stream            waits for ready | copy 0, arrived = 1 | copy 1, arrived = 2
//   engine's thread                               waits | reduce 0, open = 1 | reduce 1, open = 2
//   outward stream                           hold 1 . . . . . . . . | copy 0 | hold 2 | copy 1 | done
//
// The submitting thread puts all commands of a call into the streams and never waits. Then the engine's thread only
// waits for `arrived` and raises `open`: it never calls the device's runtime. A large call is cut into several
// operations of the engine, so that copies and reductions of different parts overlap (Algorithm 1 of the Fire-Flyer
// paper). Mirrors are in the arena, so the ranks of a host reduce them in place.
//
// Invariants
//   - A user's stream waits only for `done`. The event `done` is recorded when the call is submitted, so a stream that
//     waits for it later always waits for this call.
//   - The mirrors live until the engine and both streams have finished with them, even after a failure.
//   - If an operation fails, its gate opens nevertheless, and its outputs are filled with 0xFF bytes, NaN in every
//     floating type. So a stream that continues computes no plausible numbers from them.
//   - An event also orders a part's copy out after its copy in: CUDA does not see the order that a gate imposes.
//   - Each (group, device) has its own two streams: calls of one group never wait for another's.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "hfreduce/engine/operation.hpp"
#include "hfreduce/host/waiting.hpp"

namespace ff::hfreduce {

// A device's runtime: the calls that staging needs. Streams and events are the runtime's own handles.
//
// Thread contract: any thread, several at once. Must outlive its streams, stagers and passages.
// Calls throw Code::collective with the runtime's message.
class Device {
 public:
  using Stream = std::uintptr_t;
  using Event = std::uintptr_t;

  Device() = default;
  virtual ~Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  virtual Stream make_stream() = 0;
  virtual void drop_stream(Stream stream) noexcept = 0;  // does not end queued work
  virtual void record(Event event, Stream stream) = 0;
  // Makes the stream wait for the last record() of the event before this call; later records have no effect.
  virtual void wait(Stream stream, Event event) = 0;
  virtual void to_host(Stream stream, char* host, const char* device, std::size_t bytes) = 0;
  virtual void to_device(Stream stream, char* device, const char* host, std::size_t bytes) = 0;
  // Calls the function in stream order. It must not wait, nor call the device.
  virtual void call(Stream stream, void (*function)(void*), void* argument) = 0;
  // Makes the stream wait until the gate has reached the target. REQUIRES: the gate lies in pinned memory.
  virtual void hold(Stream stream, Flag& gate, std::uint32_t target) = 0;
  // Throws if the device has failed, so that work in the stream may never end.
  virtual void probe(Stream stream) = 0;
  // Pins host memory, so that the device copies without the processor. Returns false if other code had pinned it
  // already: then the caller must not unpin it.
  virtual bool pin(char* data, std::size_t bytes) = 0;
  virtual void unpin(char* data) noexcept = 0;

  // Pins the arena's segment that holds `block`, unless an earlier call pinned it.
  void pin_segment_of(const char* block);
  // Events are reused.
  Event borrow_event();
  void give_back(Event event) noexcept;

 protected:
  virtual Event make_event() = 0;
  virtual void drop_event(Event event) noexcept = 0;
  void close() noexcept;  // for destructors of implementations: unpins the segments, drops the events

 private:
  // Two mutexes, because the device's own threads return events, and pinning may wait for these threads.
  std::mutex pin_mutex_, event_mutex_;
  std::set<std::int32_t> pinned_;  // segments
  std::vector<char*> unpin_;       // blocks that this object must unpin
  std::vector<Event> events_;      // free events
};

// One call on device memory, from its submission until the device has finished with it.
//
// Thread contract: any thread.
class Passage {
 public:
  explicit Passage(Device& device) : device_(device), done_(device.borrow_event()) {}
  ~Passage();
  Passage(const Passage&) = delete;
  Passage& operator=(const Passage&) = delete;

  // Makes the stream wait until the results are in the device's memory, and inputs may be written again.
  void follow(Device::Stream stream) { device_.wait(stream, done_); }
  // Makes every later follow() also wait for the work in this stream. REQUIRES: the stream already follows.
  void extend(Device::Stream stream) { device_.record(done_, stream); }
  // True when the device's memory is no longer accessed.
  bool finished() const { return finished_.reached(1); }
  // Blocks until finished(), then returns true; returns false after `seconds` (< 0: no limit).
  bool wait(double seconds);

 private:
  friend class Stager;
  friend class Staging;
  struct Part {  // the part of the call that one operation of the engine handles
    Passage* passage;
    std::uint32_t number;  // from 1
    bool has_input;
    Pieces out;  // mirrors
    std::atomic<bool> failed{false};

    void poison() const;
  };

  static void arrive(void* part) noexcept;  // called by the device
  static void end(void* passage) noexcept;  // called by the device
  void let_go() noexcept;

  Device& device_;
  const Device::Event done_;
  char* mirror_ = nullptr;  // the gate, then mirrors
  Flag* open_ = nullptr;    // number of parts that may be copied out; the Flag is in pinned memory
  Flag arrived_{};          // number of parts whose input is in its mirror
  Flag finished_{};         // 1: users_ is 0
  std::deque<Part> parts_;
  std::atomic<std::size_t> users_{0};  // users of the mirrors: operations, and the device
  std::shared_ptr<Passage> self_;      // set while there are users
};

// The device side of an operation of the engine.
//
// Thread contract: the thread that runs the operation.
class Staging {
 public:
  Staging(std::shared_ptr<Passage> passage, Passage::Part& part) : passage_(std::move(passage)), part_(part) {}
  ~Staging() { finish(false); }
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // Returns true once the input is in its mirror, false after the deadline. Throws what policy.check_failures throws.
  bool await_input(const WaitPolicy& policy) const;
  // Reports that the results are in their mirrors (`good`), or never will be. Idempotent.
  void finish(bool good) noexcept;

 private:
  std::shared_ptr<Passage> passage_;  // null once finished
  Passage::Part& part_;               // the part of *passage_ that this operation handles
};

// Stages the calls of one group on one device.
//
// Thread contract: any thread; calls are staged one at a time.
class Stager {
 public:
  explicit Stager(Device& device);
  ~Stager();
  Stager(const Stager&) = delete;
  Stager& operator=(const Stager&) = delete;

  struct Staged {
    std::vector<Request> operations;  // to submit in this order
    std::shared_ptr<Passage> passage;
  };

  // Puts the copies of a call on device memory into the streams, after the current work in the user's stream. `counts`:
  // elements of each operation into which the call is cut; empty: not cut. The device's memory must stay valid until
  // the passage is finished. Throws Code::invalid for a call that cannot be cut, Code::no_space, Code::collective.
  Staged stage(const Request& request, const std::vector<std::uint64_t>& counts, Device::Stream user);

 private:
  struct Plan;
  struct Mirrors {
    char* block;
    Pieces in, out;
  };

  Mirrors make_mirrors(const Request& request);
  void enqueue(Passage& passage, const Plan& plan, Device::Stream user);

  Device& device_;
  std::mutex mutex_;  // keeps the same order in both streams
  const Device::Stream inward_, outward_;
};

}  // namespace ff::hfreduce
