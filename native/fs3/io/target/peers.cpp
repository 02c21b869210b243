#include "fs3/io/target/peers.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace ff::fs3::io {

Peers::Peers(Service& service) : service_(service) {
  ticker_ = std::thread([this] { tick(); });
}

Peers::~Peers() { stop(); }

void Peers::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    pauses_.clear();
    asked_.clear();
    routes_.clear();
    connections_.clear();
    woken_.notify_all();
  }
  if (ticker_.joinable()) ticker_.join();
}

void Peers::post(std::weak_ptr<Target> from, Posted posted, Content content) {
  const TargetId to = posted.to;
  const replica::Op op = asks(posted.message);
  const TargetId sender = std::visit([](const auto& m) { return m.from; }, posted.message);
  if (auto local = service_.of_id(to)) {
    {
      std::lock_guard lock(mutex_);
      if (stopping_) return;
      if (op != 0) asked_[{sender, op}] = {std::move(from), 0, Clock::now() + kTimeout};
    }
    const auto self = shared_from_this();
    service_.later([self, local, message = std::move(posted.message), content = std::move(content)]() mutable {
      const replica::Op answers = std::visit([](const auto& m) { return m.op; }, message);
      if (asks(message) == 0 && !self->answered(local->id(), answers)) return;  // too late
      local->receive(std::move(message), std::move(content));
    });
    return;
  }
  std::shared_ptr<Service::Connection> connection;
  {
    std::lock_guard lock(mutex_);
    if (stopping_) return;
    if (const auto route = routes_.find(to); route != routes_.end()) {
      connection = route->second;
    } else if (const auto node = nodes_.find(to); node != nodes_.end()) {
      const auto found = connections_.find(node->second);
      if (found == connections_.end()) wanted_.insert(node->second);
      else connection = found->second;
    }
    if (op != 0) {
      const auto until = Clock::now() + (connection ? Clock::duration(kTimeout) : Clock::duration(kPause));
      asked_[{sender, op}] = {std::move(from), connection ? connection->id : 0, until};
    }
  }
  if (!connection) return;
  Outgoing outgoing;
  const auto table = encode(posted);
  Head head;
  head.kind = FrameKind::message;
  head.flags = static_cast<std::uint8_t>(std::min<std::size_t>(content.hop, 7));
  head.count = 1;
  head.table_bytes = static_cast<std::uint32_t>(table.size());
  head.payload_bytes = content.bytes.size();
  head.request = op;
  outgoing.table.resize(sizeof head);
  std::memcpy(outgoing.table.data(), &head, sizeof head);
  outgoing.table.insert(outgoing.table.end(), table.begin(), table.end());
  outgoing.add(outgoing.table.data(), outgoing.table.size());
  outgoing.add(content.bytes.data(), content.bytes.size());
  outgoing.holds.push_back(content.holder);
  service_.answer(connection, std::move(outgoing));
}

void Peers::pause(std::weak_ptr<Target> target, replica::Op op) {
  std::lock_guard lock(mutex_);
  pauses_.emplace(Clock::now() + kPause, std::pair(std::move(target), op));
  woken_.notify_all();
}

void Peers::aside(std::function<void()> job) { service_.later(std::move(job)); }

void Peers::locate(TargetId target, std::uint32_t node) {
  std::lock_guard lock(mutex_);
  nodes_[target] = node;
}

void Peers::connected(std::uint32_t node, std::shared_ptr<Service::Connection> connection) {
  std::lock_guard lock(mutex_);
  if (stopping_) return;
  wanted_.erase(node);
  connections_[node] = std::move(connection);
}

void Peers::remember_route(TargetId from, const std::shared_ptr<Service::Connection>& connection) {
  std::lock_guard lock(mutex_);
  if (stopping_) return;
  auto& known = routes_[from];
  if (!known || known->id < connection->id) known = connection;
}

void Peers::broken(const Service::Connection& connection) {
  std::unique_lock lock(mutex_);
  std::erase_if(routes_, [&](const auto& one) { return one.second->id == connection.id; });
  std::erase_if(connections_, [&](const auto& one) {
    if (one.second->id != connection.id) return false;
    wanted_.insert(one.first);
    return true;
  });
  give_up(lock, [&](const Asked& asked) { return asked.connection == connection.id; });
}

bool Peers::answered(TargetId target, replica::Op op) {
  std::lock_guard lock(mutex_);
  return asked_.erase({target, op}) != 0;
}

// Unlocks while it notifies the targets.
void Peers::give_up(std::unique_lock<std::mutex>& lock, const std::function<bool(const Asked&)>& which) {
  GivenUp ops;
  std::erase_if(asked_, [&](const auto& one) {
    if (!which(one.second)) return false;
    ops.emplace_back(one.second.from, one.first.second);
    return true;
  });
  if (ops.empty()) return;
  lock.unlock();
  for (const auto& [from, op] : ops) {
    if (const auto target = from.lock()) target->failed(op);
  }
  lock.lock();
}

std::vector<std::uint32_t> Peers::wanted() const {
  std::lock_guard lock(mutex_);
  return {wanted_.begin(), wanted_.end()};
}

void Peers::tick() {
  std::unique_lock lock(mutex_);
  auto look = Clock::now() + kCheckInterval;
  while (!stopping_) {
    const auto now = Clock::now();
    if (now >= look) {
      give_up(lock, [now](const Asked& asked) { return asked.until <= now; });
      look = now + kCheckInterval;
      lock.unlock();
      service_.release_old();
      lock.lock();
    } else if (!pauses_.empty() && pauses_.begin()->first <= now) {
      const auto [target, op] = pauses_.begin()->second;
      pauses_.erase(pauses_.begin());
      lock.unlock();
      if (const auto alive = target.lock()) alive->retry(op);
      lock.lock();
    } else {
      woken_.wait_until(lock, pauses_.empty() ? look : std::min(look, pauses_.begin()->first));
    }
  }
}

}  // namespace ff::fs3::io
