#include "fs3/io/client/engine.hpp"

#include <algorithm>
#include <utility>

#include "base/error.hpp"
#include "base/process/fork_guard.hpp"
#include "fs3/io/client/call.hpp"

namespace ff::fs3::io {
namespace {

// Returns whether a write with this outcome is over: it will not be done later, or again.
bool known(Outcome outcome) {
  switch (outcome) {
    case Outcome::stale_routing:  // a stopping server may answer so after it has begun the write
    case Outcome::lost:
    case Outcome::late:
    case Outcome::unreachable:
    case Outcome::no_route:
    case Outcome::open: return false;
    default: return true;
  }
}

}  // namespace

// A lane borrowed for the duration of a call.
class Engine::Borrowed {
 public:
  Borrowed(Engine& engine, Clock::time_point deadline) : engine_(engine), lane_(engine.take_lane(deadline)) {}
  ~Borrowed() {
    if (!lane_) return;
    lane_->drop_busy();
    engine_.give_lane(std::move(lane_));
  }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;
  Lane* get() const { return lane_.get(); }

 private:
  Engine& engine_;
  std::unique_ptr<Lane> lane_;
};

Engine::Engine(std::uint64_t client, EngineOptions options, Connect connect, Signal signal)
    : client_(client),
      options_(options),
      connect_(std::move(connect)),
      signal_(std::move(signal)),
      generation_(fork_guard::generation()),
      permits_(options.senders),
      table_(std::make_shared<Table>()),
      local_(options.local) {
  if (options.lanes == 0 || options.senders == 0 || client == 0)
    throw Error(Code::invalid, "invalid engine: expected a client number, at least one lane and at least one sender");
}

void Engine::routing(std::span<const Route> routes, std::uint32_t local) {
  auto fresh = std::make_shared<Table>();
  std::lock_guard lock(mutex_);
  for (const Route& route : routes) {
    Chain& chain = (*fresh)[route.chain];
    chain.version = route.version;
    for (const std::uint32_t node : route.nodes) {
      auto& load = loads_[node];
      if (!load) load = std::make_unique<Load>(0);
      if (node == local) chain.local = chain.replicas.size();
      chain.replicas.push_back({node, load.get()});
    }
  }
  table_ = std::move(fresh);
}

std::shared_ptr<const Engine::Table> Engine::table() const {
  std::lock_guard lock(mutex_);
  return table_;
}

const Engine::ReplicaNode* Engine::choose(const Chain& chain, const Piece& piece, bool head) const {
  const auto& replicas = chain.replicas;
  if (replicas.empty()) return nullptr;
  if (head || replicas.size() == 1) return &replicas.front();
  const auto named = std::find_if(replicas.begin(), replicas.end(),
                                  [&](const ReplicaNode& replica) { return replica.node == piece.choice; });
  if (named != replicas.end()) return &*named;
  if (chain.local < replicas.size()) return &replicas[chain.local];
  const std::size_t first = turn_.fetch_add(1, std::memory_order_relaxed) % replicas.size();
  const ReplicaNode& a = replicas[first];
  const ReplicaNode& b = replicas[(first + 1) % replicas.size()];
  return b.load->load(std::memory_order_relaxed) < a.load->load(std::memory_order_relaxed) ? &b : &a;
}

std::size_t Engine::read(std::span<Piece> pieces, Clock::time_point deadline) {
  return run(FrameKind::read, pieces, deadline);
}

std::size_t Engine::write(std::span<Piece> pieces, Clock::time_point deadline) {
  return run(FrameKind::write, pieces, deadline);
}

std::size_t Engine::query_last(std::span<Piece> pieces, Clock::time_point deadline) {
  return run(FrameKind::query_last, pieces, deadline);
}

std::size_t Engine::run(FrameKind kind, std::span<Piece> pieces, Clock::time_point deadline) {
  if (fork_guard::generation() != generation_)
    throw Error(Code::invalid, "this client belongs to the parent process: connect again in the child");
  const auto not_ok = [&] {
    return static_cast<std::size_t>(
        std::count_if(pieces.begin(), pieces.end(), [](const Piece& piece) { return piece.outcome != Outcome::ok; }));
  };
  const Borrowed lane(*this, deadline);
  if (!lane.get()) {
    for (Piece& piece : pieces) {
      if (piece.outcome == Outcome::open) piece.outcome = Outcome::late;
    }
    return not_ok();
  }
  {
    Call call(*this, *lane.get(), kind, deadline);
    for (Piece& piece : pieces) {
      if (piece.outcome == Outcome::open) call.add(piece);
    }
    call.run();
  }
  if (kind == FrameKind::write) {
    for (Piece& piece : pieces) settle(piece);
  }
  return not_ok();
}

void Engine::tag(Piece& piece) {
  if (piece.channel != 0) return;
  std::lock_guard lock(mutex_);
  if (channels_.empty()) channels_.push_back({next_channel_++, 0});
  piece.channel = channels_.back().number;
  piece.seq = channels_.back().seq + 1;
  channels_.pop_back();
}

void Engine::settle(Piece& piece) {
  if (piece.channel == 0 || !known(piece.outcome)) return;
  std::lock_guard lock(mutex_);
  channels_.push_back({piece.channel, piece.seq});
  piece.channel = 0;
}

std::unique_ptr<Lane> Engine::take_lane(Clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  const auto ready = [this] { return !lanes_.empty() || lane_count_ < options_.lanes; };
  if (!lane_free_.wait_until(lock, deadline, ready)) return nullptr;
  if (lanes_.empty()) {
    auto lane = std::make_unique<Lane>();
    ++lane_count_;
    return lane;
  }
  auto lane = std::move(lanes_.back());
  lanes_.pop_back();
  return lane;
}

void Engine::give_lane(std::unique_ptr<Lane> lane) {
  {
    std::lock_guard lock(mutex_);
    lanes_.push_back(std::move(lane));
  }
  lane_free_.notify_one();
}

EngineStatistics Engine::statistics() const {
  return {read_bytes_,  local_bytes_, written_bytes_,  frames_,        mismatches_,
          connections_, held_,        permits_.used(), permits_.most()};
}

}  // namespace ff::fs3::io
