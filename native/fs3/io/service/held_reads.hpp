// READs of one connection whose bytes are in memory and that wait for the client's `go` ("request to send").
//
//   READ, "hold" -> begin -> read from the disk -> keep, `ready` -> go: take -> answer
//
// A held READ keeps its extents from being reused, as an answer queued on the socket does. Its bytes are in the page
// cache and in no buffer of the service, so a held READ delays nothing else. If a client does not send `go` within
// kTime, the extents are released; a later `go` makes the service read the chunks again. If the kernel evicts the pages
// meanwhile, they are read from the disk while they are sent.
//
// An answer after a late `go` is valid, because it names the version that was committed when the service decided the
// READ. The same answer could also have waited in the socket while the chain changed.
//
// Thread contract: all calls from any thread.
// Invariant: at most kMostFrames READs have begun or are held; after `clear` none is held and none begins.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "fs3/io/target/target.hpp"
#include "fs3/io/wire/wire.hpp"

namespace ff::fs3::io {

class HeldReads {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::size_t kMostFrames = 16;
  static constexpr auto kTime = std::chrono::seconds(10);

  struct Read {
    Head head;
    std::vector<std::byte> table;                  // the request's table
    std::vector<std::shared_ptr<Target>> targets;  // outlive their readings
    std::vector<store::Reading> readings;          // empty: released; everything must be read again
  };

  bool begin(std::uint64_t request);  // false: not held, because too many are held, or the number is in use
  bool keep(Read read);               // REQUIRES: the READ has begun. False: the connection is gone
  std::optional<Read> take(std::uint64_t request);  // none: the READ is not held, or not ready yet
  void expire(Clock::time_point now);
  void forget(const Target& target);  // releases the target's readings, because its store is to be closed
  void clear();
  std::size_t held() const;

 private:
  struct Held {
    std::optional<Read> read;  // none: the bytes are still being read from the disk
    Clock::time_point since = {};
  };
  template <class Which>
  void let_go(const Which& which);

  mutable std::mutex mutex_;                      // guards the members below
  std::unordered_map<std::uint64_t, Held> held_;  // by request
  bool cleared_ = false;
};

}  // namespace ff::fs3::io
