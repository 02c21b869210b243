// What a client on this machine reads by itself: the files that one connection's client was given, and the extents that
// stay for it. The client's side is local.hpp.
//
//   READ, "local" -> give: descriptors that the client lacks, CRCs, places -> its preads -> `done` of its next frame
//
// Thread contract: all calls from any thread. The mutex is held over that of the line, and over nothing else.
// Invariants
//   - An extent that was named is held until the client's `done` counts its answer, `clear`, or kLocalTime is over. A
//     client takes nothing for good that it read later than that after asking.
//   - Answers leave in the order in which slots were given: a slot holds for the client what it held here.
//   - At most kMostFrames answers and kMostBytes (or one answer) are held for a connection; the rest travels as bytes.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "fs3/io/line.hpp"
#include "fs3/io/target.hpp"
#include "fs3/io/wire.hpp"

namespace ff::fs3::io {

ReadAnswer answer_of(const store::Reading& reading);

class Sharing {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::size_t kMostFrames = 16;
  static constexpr std::uint64_t kMostBytes = std::uint64_t{256} << 20;

  explicit Sharing(Line& line) : line_(line) {}

  // Answers a READ with places and queues that on the line. False: it must go as bytes; nothing was changed then.
  // `targets[n]` has the file of `readings[n]`.
  bool give(std::uint64_t request, std::vector<store::Reading>& readings, std::vector<std::shared_ptr<Target>>& targets);
  bool done(std::uint32_t count);       // of all answers ever given; false: no such number
  void expire(Clock::time_point now);   // what is held too long
  void forget(const Target& target);    // what is held of it: its store is to be closed
  void clear();
  std::size_t held() const;             // answers

 private:
  struct Slot {
    std::weak_ptr<Target> target;
    store::File file = store::kNoFile;
    std::uint64_t used = 0;  // by the answer of that number
  };
  struct Held {
    std::vector<std::shared_ptr<Target>> targets;  // outlive their readings
    std::vector<store::Reading> readings;
    std::uint64_t bytes = 0;
    Clock::time_point since;
  };
  struct Files;  // read-only descriptors on their way
  struct Plan;

  bool plan(const std::vector<store::Reading>& readings, const std::vector<std::shared_ptr<Target>>& targets, Plan& plan);
  Slot* find(const std::shared_ptr<Target>& target, store::File file);
  template <class Which>
  std::vector<Held> take(const Which& which);  // empties those; REQUIRES: mutex_

  Line& line_;
  mutable std::mutex mutex_;  // guards what follows
  std::array<Slot, kLocalSlots> slots_;
  std::size_t last_ = 0;  // slot
  std::uint64_t answers_ = 0;
  std::uint32_t done_ = 0;
  std::deque<Held> held_;  // answers that the client did not count yet; empty ones hold nothing any more
  std::uint64_t bytes_ = 0;
};

}  // namespace ff::fs3::io
