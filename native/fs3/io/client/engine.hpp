// The client's data path: a batch of pieces of chunks, split by server into frames and sent by the caller's thread.
//
//   pieces -> a node for each -> frames of its pieces -> lane (a connection to each node) -> outcomes
//
// Thread contract: all calls from any thread. A call runs in its caller's thread; the engine has no thread of its own.
// The caller's thread calls Connect and Signal without a lock. Pieces and their memory belong to the call until it
// returns.
// Invariants
//   - A call returns when all its pieces have an outcome, at the latest at the deadline, or when a running Connect
//     returns after it. A call throws what Connect and Signal throw, except Code::peer_lost and deadline_exceeded, and
//     throws if a lane cannot be made. Pieces without an answer when the call returns or throws are `late`.
//   - At most one write is outstanding per (client, channel). A channel is reused only when the outcome of its last
//     write is known.
//   - At most `senders` permits for large transfers (READ answers of more than kHoldFrom bytes) are in use. A permit
//     belongs to a node that may send at once, or to one answer for which `go` was sent. An answer that is not ready
//     takes no permit.
//   - At most kAhead frames are outstanding per connection, which bounds the memory in flight.
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

#include "fs3/io/client/lane.hpp"
#include "fs3/io/client/piece.hpp"
#include "fs3/io/service/permits.hpp"

namespace ff::fs3::io {

struct Route {
  std::uint32_t chain = 0;
  ChainVersion version = 0;
  std::vector<std::uint32_t> nodes;  // nodes of the serving targets, head first
};

struct EngineOptions {
  unsigned lanes = 8;                       // concurrent calls; further calls wait
  unsigned senders = 2;                     // concurrent large transfers
  std::chrono::milliseconds connect{1000};  // limit for one connection
  bool local = true;                        // read chunks of nodes on this machine from their files
};

struct EngineStatistics {
  std::uint64_t read_bytes = 0, local_bytes = 0, written_bytes = 0, frames = 0, mismatches = 0, connections = 0;
  std::uint64_t held = 0;                  // READ requests whose answers waited for `go`
  unsigned senders = 0, most_senders = 0;  // permits for large transfers: in use, and the most so far
};

class Engine {
 public:
  using Clock = std::chrono::steady_clock;
  // Returns a connected and authenticated socket to a node, within `limit`; the engine then owns the socket.
  using Connect = std::function<int(std::uint32_t node, std::chrono::milliseconds limit)>;
  using Signal = std::function<void()>;  // called when a signal may have interrupted a wait; may throw to end the call

  static constexpr unsigned kAhead = 3;  // frames outstanding on one connection

  Engine(std::uint64_t client, EngineOptions options, Connect connect, Signal signal = [] {});

  // Replaces the routing; `local` is the node on this machine, or kAnyNode. Running calls keep their routing, but stop
  // waiting for nodes that no longer serve the pieces asked from them.
  void routing(std::span<const Route> routes, std::uint32_t local);

  // Each call tries the pieces that are `open` and returns how many of all pieces are not ok afterwards.
  std::size_t read(std::span<Piece> pieces, Clock::time_point deadline);
  std::size_t write(std::span<Piece> pieces, Clock::time_point deadline);
  std::size_t query_last(std::span<Piece> pieces, Clock::time_point deadline);

  EngineStatistics statistics() const;

 private:
  using Load = std::atomic<std::uint64_t>;  // bytes asked from a node and not answered yet
  struct ReplicaNode {
    std::uint32_t node;
    Load* load;
  };
  struct Chain {
    ChainVersion version = 0;
    std::vector<ReplicaNode> replicas;
    std::size_t local = SIZE_MAX;  // index of the replica on this machine
  };
  using Table = std::unordered_map<std::uint32_t, Chain>;
  class Call;
  class Borrowed;

  std::size_t run(FrameKind kind, std::span<Piece> pieces, Clock::time_point deadline);
  std::shared_ptr<const Table> table() const;
  const ReplicaNode* choose(const Chain& chain, const Piece& piece, bool head) const;
  void tag(Piece& piece);     // takes a channel for the piece, if it has none
  void settle(Piece& piece);  // returns the piece's channel if its outcome is known
  std::unique_ptr<Lane> take_lane(Clock::time_point deadline);
  void give_lane(std::unique_ptr<Lane> lane);

  const std::uint64_t client_;
  const EngineOptions options_;
  const Connect connect_;
  const Signal signal_;
  const unsigned generation_;  // fork generation of the process that owns the sockets
  Permits permits_;

  mutable std::mutex mutex_;  // guards the members below
  std::shared_ptr<const Table> table_;
  std::unordered_map<std::uint32_t, std::unique_ptr<Load>> loads_;
  std::vector<std::unique_ptr<Lane>> lanes_;  // free lanes
  unsigned lane_count_ = 0;
  std::condition_variable lane_free_;
  struct Channel {
    std::uint32_t number;
    std::uint64_t seq;
  };
  std::vector<Channel> channels_;  // free channels
  std::uint32_t next_channel_ = 1;

  mutable std::atomic<std::uint32_t> turn_ = 0;
  std::atomic<bool> local_;
  std::atomic<std::uint64_t> read_bytes_ = 0, local_bytes_ = 0, written_bytes_ = 0, frames_ = 0, mismatches_ = 0,
                             connections_ = 0;
  std::atomic<std::uint64_t> held_ = 0;
};

}  // namespace ff::fs3::io
