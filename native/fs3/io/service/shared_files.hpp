// Local reads of one connection's client: the files given to it, and the extents held for it. The client's side is
// local_files.hpp.
//
//   READ, "local" -> give: descriptors that the client lacks, CRCs, places -> its preads -> `done` of its next frame
//
// Thread contract: all calls from any thread. A thread that holds the mutex takes no other lock than that of the
// FrameConnection.
// Invariants
//   - An extent that an answer names is held until the client's `done` counts the answer, until `clear`, or for
//     kLocalTime. A client rejects bytes that it read more than kLocalTime after its request.
//   - Answers leave in the order in which slots were given, so a slot holds the same file on both sides.
//   - At most kMostFrames answers and kMostBytes (or one answer) are held per connection; further answers are sent as
//     bytes.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "fs3/io/target/target.hpp"
#include "fs3/io/wire/frame_connection.hpp"
#include "fs3/io/wire/wire.hpp"

namespace ff::fs3::io {

ReadAnswer answer_of(const store::Reading& reading);

class SharedFiles {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::size_t kMostFrames = 16;
  static constexpr std::uint64_t kMostBytes = std::uint64_t{256} << 20;

  explicit SharedFiles(FrameConnection& line) : line_(line) {}

  // Answers a READ with places and queues the answer on the line. `targets[n]` has the file of `readings[n]`. Returns
  // false, and changes nothing, if the answer must be sent as bytes.
  bool give(std::uint64_t request, std::vector<store::Reading>& readings,
            std::vector<std::shared_ptr<Target>>& targets);
  bool done(std::uint32_t count);      // `count`: answers that the client has read so far; false: impossible count
  void expire(Clock::time_point now);  // releases extents that were held too long
  void forget(const Target& target);   // releases the target's extents, because its store will be closed
  void clear();
  std::size_t held() const;  // number of answers

 private:
  struct Slot {
    std::weak_ptr<Target> target;
    store::File file = store::kNoFile;
    std::uint64_t used = 0;  // number of the last answer that used it
  };
  struct Held {
    std::vector<std::shared_ptr<Target>> targets;  // outlive their readings
    std::vector<store::Reading> readings;
    std::uint64_t bytes = 0;
    Clock::time_point since;
  };
  struct Files;  // read-only descriptors to be sent
  struct Plan;

  bool plan(const std::vector<store::Reading>& readings, const std::vector<std::shared_ptr<Target>>& targets,
            Plan& plan);
  Slot* find(const std::shared_ptr<Target>& target, store::File file);
  template <class Which>
  std::vector<Held> take(const Which& which);  // empties the entries it takes; REQUIRES: mutex_

  FrameConnection& line_;
  mutable std::mutex mutex_;  // guards the members below
  std::array<Slot, kLocalSlots> slots_;
  std::size_t last_ = 0;  // index of the last slot used
  std::uint64_t answers_ = 0;
  std::uint32_t done_ = 0;
  std::deque<Held> held_;  // answers that the client has not counted yet; released answers are empty
  std::uint64_t bytes_ = 0;
};

}  // namespace ff::fs3::io
