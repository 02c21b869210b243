// READs of one connection whose bytes are in memory and that wait for the client's `go` ("request to send").
//
//   READ, "hold" -> begin -> the disk's time -> keep, `ready` -> go: take -> answer
//
// What is held is the extents, as for an answer that waits in the socket; their bytes are in the page cache and in no
// buffer of the service. So what is held keeps nothing else waiting, and a client that never says go costs its extents
// for kTime: then they are let go, and read again at `go`. If the kernel drops the pages meanwhile, they are read from
// the disk while they are sent.
//
// Why a late answer is a good one: it names the version that was committed when the READ was decided, between its
// question and its answer. Whatever the chain became since, it could as well have lain in the socket.
//
// Thread contract: all calls from any thread.
// Invariant: at most kMostFrames have begun or are held; after `clear` none are and none begin.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "fs3/io/target.hpp"
#include "fs3/io/wire.hpp"

namespace ff::fs3::io {

class Holding {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::size_t kMostFrames = 16;
  static constexpr auto kTime = std::chrono::seconds(10);

  struct Read {
    Head head;
    std::vector<std::byte> table;  // of the request
    std::vector<std::shared_ptr<Target>> targets;  // outlive their readings
    std::vector<store::Reading> readings;          // none: they were let go, all is to be read again
  };

  bool begin(std::uint64_t request);  // false: it is not held, since there are enough, or one of that number
  bool keep(Read read);               // REQUIRES: it has begun. False: the connection is gone
  std::optional<Read> take(std::uint64_t request);  // none: it is not held, or not yet
  void expire(Clock::time_point now);
  void forget(const Target& target);  // its readings: its store is to be closed
  void clear();
  std::size_t held() const;

 private:
  struct Held {
    std::optional<Read> read;  // none: the disk works on it
    Clock::time_point since = {};
  };
  template <class Which>
  void let_go(const Which& which);

  mutable std::mutex mutex_;  // guards what follows
  std::unordered_map<std::uint64_t, Held> held_;  // by request
  bool cleared_ = false;
};

}  // namespace ff::fs3::io
