#include "fs3/io/client/call.hpp"

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <utility>

#include "base/crc/crc32c.hpp"
#include "base/error.hpp"

namespace ff::fs3::io {
namespace {

// Entries of the first frame of a local read: few, so that the node looks up the rest while this thread reads.
constexpr std::size_t kFirstLocal = 16;

// Makes the CRCs of a write's pieces, cut at block boundaries. Makes them only once, so that a retry cannot certify
// bytes that changed meanwhile.
void make_crcs(Piece& piece) {
  if (!piece.carries() || !piece.crcs.empty()) return;
  piece.crcs.reserve(pieces(piece.offset, piece.length));
  for (std::size_t from = 0; from < piece.length;) {
    const std::size_t step = std::min<std::size_t>(kBlock - (piece.offset + from) % kBlock, piece.length - from);
    piece.crcs.push_back(crc32c(0, piece.memory + from, step));
    from += step;
  }
}

}  // namespace

Engine::Call::Call(Engine& engine, Lane& lane, FrameKind kind, Clock::time_point deadline)
    : engine_(engine), lane_(lane), kind_(kind), deadline_(deadline), table_(engine.table()) {}

Engine::Call::~Call() {
  for (Queue& queue : queues_) {
    queue.load->fetch_sub(queue.charged, std::memory_order_relaxed);
    for (Piece* piece : queue.pieces) {
      if (piece->outcome == Outcome::open) piece->outcome = Outcome::late;
    }
  }
  Permits& permits = engine_.permits_;
  for (std::uint64_t given = queue_places_ == 0 ? 0 : permits.leave(lane_.wake()); given != 0; --given)
    permits.give_back();
  for (; permitted_ != 0; --permitted_) permits.give_back();
  for (Queue& queue : queues_) {
    for (; queue.direct != 0; --queue.direct) permits.over(queue.node);
  }
  if (!joined_.empty()) permits.part(joined_);
}

void Engine::Call::add(Piece& piece) {
  const auto found = table_->find(piece.chain);
  const bool head = kind_ == FrameKind::write;
  const ReplicaNode* const replica = found == table_->end() ? nullptr : engine_.choose(found->second, piece, head);
  if (!replica) {
    piece.outcome = Outcome::no_route;
    return;
  }
  if (piece.length == 0 && kind_ == FrameKind::read) {
    piece.outcome = Outcome::ok;
    return;
  }
  piece.asked = replica->node;
  piece.chain_version = found->second.version;
  if (last_ >= queues_.size() || queues_[last_].node != replica->node) {
    const auto same = [&](const Queue& queue) { return queue.node == replica->node; };
    last_ = static_cast<std::size_t>(std::find_if(queues_.begin(), queues_.end(), same) - queues_.begin());
    if (last_ == queues_.size()) queues_.push_back({replica->node, replica->load});
  }
  Queue& queue = queues_[last_];
  queue.pieces.push_back(&piece);
  queue.charged += piece.length;
  queue.load->fetch_add(piece.length, std::memory_order_relaxed);
}

// Runs the call. Existing connections get their first frames before new connections are made.
void Engine::Call::run() {
  for (Queue& queue : queues_) {
    const auto found = lane_.links.find(queue.node);
    if (found == lane_.links.end()) continue;
    if (found->second->quiet()) queue.link = found->second.get();
    else lane_.links.erase(found);
  }
  join();
  push();
  for (Queue& queue : queues_) {
    if (queue.link || queue.next == queue.pieces.size()) continue;
    connect(queue);
    push();
  }
  while (!finished() && Clock::now() < deadline_) {
    wait();
    leave_stale();
    for (Queue& queue : queues_) {
      if (queue.link) advance(queue);
    }
    push();
  }
}

// Announces the nodes from which many bytes are requested. A connection that is not made yet may turn out to be local;
// then this one call asks for more permits than necessary.
void Engine::Call::join() {
  for (const Queue& queue : queues_) {
    if (large(queue.charged, queue.link)) joined_.push_back(queue.node);
  }
  if (!joined_.empty()) engine_.permits_.join(joined_);
}

// Sends, receives and issues frames until the next step must wait for a socket or a permit.
void Engine::Call::push() {
  while (issue_all() || take_permits()) {
    for (Queue& queue : queues_) {
      if (queue.link) advance(queue);
    }
  }
}

void Engine::Call::connect(Queue& queue) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline_ - Clock::now());
  if (left.count() <= 0) return;
  try {
    const int fd = engine_.connect_(queue.node, std::min(left, engine_.options_.connect));
    auto link = std::make_unique<Link>(fd, engine_.local_.load(std::memory_order_relaxed));
    queue.link = link.get();
    lane_.links[queue.node] = std::move(link);
    ++engine_.connections_;
  } catch (const Error& error) {
    if (error.code() != Code::peer_lost && error.code() != Code::deadline_exceeded) throw;
    end(queue, Outcome::unreachable);
  }
}

void Engine::Call::end(Queue& queue, Outcome outcome) {
  for (; queue.next < queue.pieces.size(); ++queue.next) queue.pieces[queue.next]->outcome = outcome;
}

Request Engine::Call::next_frame(const Queue& queue) const {
  Request request;
  request.kind = kind_;
  std::size_t table = 0;
  const bool bytes_go = kind_ != FrameKind::query_last;
  const bool overlaps = kind_ == FrameKind::read && queue.next == 0 && queue.link->local();
  const std::size_t most = std::min(overlaps ? kFirstLocal : kMostEntries, queue.pieces.size() - queue.next);
  request.pieces.reserve(most);
  for (std::size_t n = queue.next; n < queue.pieces.size() && request.pieces.size() < most; ++n) {
    Piece* const piece = queue.pieces[n];
    const std::uint64_t bytes = !bytes_go || (kind_ == FrameKind::write && !piece->carries()) ? 0 : piece->length;
    table += sizeof(WriteEntry) + (bytes / kBlock + 2) * sizeof(std::uint32_t);
    if (!request.pieces.empty() && (request.bytes + bytes > kMostPayload || table > kMostTable)) break;
    request.pieces.push_back(piece);
    request.bytes += bytes;
  }
  return request;
}

bool Engine::Call::large(std::uint64_t bytes, const Link* link) const {
  return kind_ == FrameKind::read && bytes > kHoldFrom && !(link && link->local());
}

void Engine::Call::ask(Queue& queue) {
  for (const std::uint64_t request : queue.link->take_ready()) {
    if (engine_.permits_.ask(lane_.wake())) {
      queue.link->go(request);
      ++permitted_;
    } else {
      ready_.push_back({&queue, request});
      ++queue_places_;
    }
  }
}

bool Engine::Call::take_permits() {
  eventfd_t told = 0;
  if (queue_places_ == 0 || ::eventfd_read(lane_.wake(), &told) != 0) return false;
  queue_places_ -= told;
  for (; told != 0; --told) {
    if (ready_.empty()) {
      engine_.permits_.give_back();
      continue;
    }
    ready_.front().queue->link->go(ready_.front().request);
    ready_.pop_front();
    ++permitted_;
  }
  return true;
}

bool Engine::Call::issue_all() {
  bool any = false;
  for (bool more = true; more;) {  // takes a frame of each queue in turn
    more = false;
    for (Queue& queue : queues_) {
      if (!queue.link) continue;
      more |= issue(queue);
    }
    any |= more;
  }
  return any;
}

bool Engine::Call::issue(Queue& queue) {
  if (queue.next == queue.pieces.size() || queue.outstanding == kAhead) return false;
  Request request = next_frame(queue);
  if (large(request.bytes, queue.link)) {
    request.direct = engine_.permits_.direct(queue.node);
    request.held = !request.direct;
    queue.direct += request.direct;
    engine_.held_ += request.held;
  }
  if (kind_ == FrameKind::write) {
    for (Piece* piece : request.pieces) {
      make_crcs(*piece);
      engine_.tag(*piece);
    }
  }
  queue.next += request.pieces.size();
  ++queue.outstanding;
  ++engine_.frames_;
  queue.link->post(std::move(request), engine_.client_);
  return true;
}

void Engine::Call::advance(Queue& queue) {
  done_.clear();
  const bool standing = queue.link->advance(done_);
  for (const Request& request : done_) answered(queue, request);
  if (standing) ask(queue);
  else lose(queue);
}

void Engine::Call::lose(Queue& queue) {
  done_.clear();
  queue.link->give_up(done_);
  for (const Request& request : done_) answered(queue, request);
  std::erase_if(ready_, [&queue](const Ready& ready) { return ready.queue == &queue; });
  // This process has too many open descriptors. From now on the engine asks for answers that carry the bytes, because
  // such answers bring no descriptors.
  if (queue.link->overflown()) engine_.local_ = false;
  queue.link = nullptr;
  lane_.links.erase(queue.node);
  end(queue, Outcome::unreachable);
}

// Ends waits for nodes that the new routing no longer names: a frozen or unreachable node does not answer, and its
// connection does not break.
void Engine::Call::leave_stale() {
  auto now = engine_.table();
  if (now == table_) return;
  table_ = std::move(now);
  const auto serves = [this](const Piece& piece, std::uint32_t node) {
    const auto chain = table_->find(piece.chain);
    if (chain == table_->end() || chain->second.replicas.empty()) return false;
    const auto& replicas = chain->second.replicas;
    if (kind_ == FrameKind::write) return replicas.front().node == node;
    return std::any_of(replicas.begin(), replicas.end(),
                       [&](const ReplicaNode& replica) { return replica.node == node; });
  };
  for (Queue& queue : queues_) {
    const auto stale = [&](const Piece* piece) {
      return piece->outcome == Outcome::open && !serves(*piece, queue.node);
    };
    if (queue.link && std::any_of(queue.pieces.begin(), queue.pieces.end(), stale)) lose(queue);
  }
}

void Engine::Call::answered(Queue& queue, const Request& request) {
  --queue.outstanding;
  std::uint64_t bytes = 0, good = 0;
  for (Piece* piece : request.pieces) {
    bytes += piece->length;
    if (piece->outcome == Outcome::ok) good += piece->length;
    if (piece->outcome == Outcome::mismatch) ++engine_.mismatches_;
    if (kind_ == FrameKind::write) engine_.settle(*piece);
  }
  if (kind_ == FrameKind::read) engine_.read_bytes_ += good;
  if (request.local) engine_.local_bytes_ += good;
  if (kind_ == FrameKind::write) engine_.written_bytes_ += good;
  queue.charged -= bytes;
  queue.load->fetch_sub(bytes, std::memory_order_relaxed);
  if (request.direct) {
    --queue.direct;
    engine_.permits_.over(queue.node);
  }
  if (!request.permitted) return;
  --permitted_;
  engine_.permits_.give_back();
}

bool Engine::Call::finished() const {
  return std::all_of(queues_.begin(), queues_.end(),
                     [](const Queue& queue) { return queue.next == queue.pieces.size() && queue.outstanding == 0; });
}

void Engine::Call::wait() {
  std::vector<pollfd> fds;
  for (const Queue& queue : queues_) {
    if (queue.link && queue.link->events() != 0) fds.push_back({queue.link->fd(), queue.link->events(), 0});
  }
  if (queue_places_ != 0) fds.push_back({lane_.wake(), POLLIN, 0});
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline_ - Clock::now());
  if (left.count() <= 0) return;
  const int limit = static_cast<int>(std::min<std::int64_t>(left.count(), kRoutingCheckMs));
  if (::poll(fds.data(), fds.size(), limit) <= 0) engine_.signal_();  // a signal may have come outside of poll
}

}  // namespace ff::fs3::io
