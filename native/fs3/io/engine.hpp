// The client's way to the bytes: a batch of pieces of chunks, split by server into frames, done by the caller's thread.
//
//   pieces -> a node for each -> frames of its pieces -> lane (a connection to each node) -> outcomes
//
// Thread contract: all calls from any thread; a call runs in the thread that makes it and there is no other. Connect and
// Signal are called by that thread, without a lock. Pieces and their memory are the call's until it returns.
// Invariants
//   - A call returns when all its pieces have an outcome, at the deadline at the latest (a Connect under way is waited
//     for). It throws only what Connect and Signal throw beside Code::peer_lost and deadline_exceeded, and for a lane
//     that cannot be made; what had no answer is `late` then.
//   - One write is outstanding with a (client, channel); a channel is used again only when the outcome of its last write
//     is known.
//   - At most `senders` send much (READ answers of more than kHoldFrom bytes) at a time: nodes that may at once, and
//     answers that were told to go. What a node does until an answer is ready takes none of these places.
//   - Whatever is outstanding in memory is at most kAhead frames a connection.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "fs3/io/lane.hpp"
#include "fs3/io/permits.hpp"
#include "fs3/io/piece.hpp"

namespace ff::fs3::io {

struct Route {
  std::uint32_t chain = 0;
  ChainVersion version = 0;
  std::vector<std::uint32_t> nodes;  // of the serving targets, head first
};

struct EngineOptions {
  unsigned lanes = 8;    // calls at a time; more wait
  unsigned senders = 2;  // that send much at a time
  std::chrono::milliseconds connect{1000};  // for one connection
  bool local = true;     // what nodes on this machine have is read from their files
};

struct EngineStatistics {
  std::uint64_t read_bytes = 0, local_bytes = 0, written_bytes = 0, frames = 0, mismatches = 0, connections = 0;
  std::uint64_t held = 0;  // READ requests that asked to be told to go
  unsigned senders = 0, most_senders = 0;  // that may send much: now, and at a time
};

class Engine {
 public:
  using Clock = std::chrono::steady_clock;
  // A connected and proved socket to a node, within `limit`; the engine's from then on.
  using Connect = std::function<int(std::uint32_t node, std::chrono::milliseconds limit)>;
  using Signal = std::function<void()>;  // a signal may have come while a call waited; may throw to end the call

  static constexpr unsigned kAhead = 3;  // frames outstanding on one connection

  Engine(std::uint64_t client, EngineOptions options, Connect connect, Signal signal = [] {});

  // Replaces the routing; `local` is the node on this machine, or kAnyNode. Calls under way go on with theirs, but wait no
  // longer for nodes that do not serve any more what they were asked for.
  void routing(std::span<const Route> routes, std::uint32_t local);

  // Each tries the pieces that are `open` and returns how many of all are not ok then.
  std::size_t read(std::span<Piece> pieces, Clock::time_point deadline);
  std::size_t write(std::span<Piece> pieces, Clock::time_point deadline);
  std::size_t query_last(std::span<Piece> pieces, Clock::time_point deadline);

  EngineStatistics statistics() const;

 private:
  using Load = std::atomic<std::uint64_t>;  // bytes asked from a node and not answered
  struct Seat {
    std::uint32_t node;
    Load* load;
  };
  struct Chain {
    ChainVersion version = 0;
    std::vector<Seat> seats;
    std::size_t local = SIZE_MAX;  // seat on this machine
  };
  using Table = std::unordered_map<std::uint32_t, Chain>;
  class Call;
  class Borrowed;

  std::size_t run(FrameKind kind, std::span<Piece> pieces, Clock::time_point deadline);
  std::shared_ptr<const Table> table() const;
  const Seat* choose(const Chain& chain, const Piece& piece, bool head) const;
  void tag(Piece& piece);        // takes a channel for it, if it has none
  void settle(Piece& piece);     // gives its channel back if its outcome is known
  std::unique_ptr<Lane> take_lane(Clock::time_point deadline);
  void give_lane(std::unique_ptr<Lane> lane);

  const std::uint64_t client_;
  const EngineOptions options_;
  const Connect connect_;
  const Signal signal_;
  const unsigned generation_;  // of the process whose sockets these are
  Permits permits_;

  mutable std::mutex mutex_;  // guards what follows
  std::shared_ptr<const Table> table_;
  std::unordered_map<std::uint32_t, std::unique_ptr<Load>> loads_;
  std::vector<std::unique_ptr<Lane>> lanes_;  // free ones
  unsigned lane_count_ = 0;
  std::condition_variable lane_free_;
  struct Channel {
    std::uint32_t number;
    std::uint64_t seq;
  };
  std::vector<Channel> channels_;  // free ones
  std::uint32_t next_channel_ = 1;

  mutable std::atomic<std::uint32_t> turn_ = 0;
  std::atomic<bool> local_;
  std::atomic<std::uint64_t> read_bytes_ = 0, local_bytes_ = 0, written_bytes_ = 0, frames_ = 0, mismatches_ = 0, connections_ = 0;
  std::atomic<std::uint64_t> held_ = 0;
};

}  // namespace ff::fs3::io
