#include "fs3/io/holding.hpp"

#include <algorithm>
#include <utility>

namespace ff::fs3::io {

bool Holding::begin(std::uint64_t request) {
  const std::lock_guard lock(mutex_);
  if (cleared_ || held_.size() >= kMostFrames) return false;
  return held_.try_emplace(request).second;
}

bool Holding::keep(Read read) {
  const std::lock_guard lock(mutex_);
  const auto found = held_.find(read.head.request);
  if (found == held_.end()) return false;
  found->second = {std::move(read), Clock::now()};
  return true;
}

std::optional<Holding::Read> Holding::take(std::uint64_t request) {
  const std::lock_guard lock(mutex_);
  const auto found = held_.find(request);
  if (found == held_.end() || !found->second.read) return {};
  auto read = std::move(found->second.read);
  held_.erase(found);
  return read;
}

// The readings of those go without the lock, before their targets.
template <class Which>
void Holding::let_go(const Which& which) {
  std::vector<Read> gone;
  const std::lock_guard lock(mutex_);
  for (auto& [request, held] : held_) {
    if (!held.read || held.read->readings.empty() || !which(held)) continue;
    Read& of = gone.emplace_back();
    of.targets = std::exchange(held.read->targets, {});
    of.readings = std::exchange(held.read->readings, {});
  }
}

void Holding::expire(Clock::time_point now) {
  let_go([now](const Held& held) { return now - held.since > kTime; });
}

void Holding::forget(const Target& target) {
  let_go([&](const Held& held) {
    const auto& targets = held.read->targets;
    return std::any_of(targets.begin(), targets.end(), [&](const auto& one) { return one.get() == &target; });
  });
}

void Holding::clear() {
  std::unordered_map<std::uint64_t, Held> gone;
  const std::lock_guard lock(mutex_);
  cleared_ = true;
  gone.swap(held_);
}

std::size_t Holding::held() const {
  const std::lock_guard lock(mutex_);
  return static_cast<std::size_t>(
      std::count_if(held_.begin(), held_.end(), [](const auto& one) { return one.second.read.has_value(); }));
}

}  // namespace ff::fs3::io
