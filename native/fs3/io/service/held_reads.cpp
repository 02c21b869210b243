#include "fs3/io/service/held_reads.hpp"

#include <algorithm>
#include <utility>

namespace ff::fs3::io {

bool HeldReads::begin(std::uint64_t request) {
  const std::lock_guard lock(mutex_);
  if (cleared_ || held_.size() >= kMostFrames) return false;
  return held_.try_emplace(request).second;
}

bool HeldReads::keep(Read read) {
  const std::lock_guard lock(mutex_);
  const auto found = held_.find(read.head.request);
  if (found == held_.end()) return false;
  found->second = {std::move(read), Clock::now()};
  return true;
}

std::optional<HeldReads::Read> HeldReads::take(std::uint64_t request) {
  const std::lock_guard lock(mutex_);
  const auto found = held_.find(request);
  if (found == held_.end() || !found->second.read) return {};
  auto read = std::move(found->second.read);
  held_.erase(found);
  return read;
}

// Releases the chosen readings. The local `gone` is destroyed after the lock is released, readings before their
// targets.
template <class Which>
void HeldReads::let_go(const Which& which) {
  std::vector<Read> gone;
  const std::lock_guard lock(mutex_);
  for (auto& [request, held] : held_) {
    if (!held.read || held.read->readings.empty() || !which(held)) continue;
    Read& of = gone.emplace_back();
    of.targets = std::exchange(held.read->targets, {});
    of.readings = std::exchange(held.read->readings, {});
  }
}

void HeldReads::expire(Clock::time_point now) {
  let_go([now](const Held& held) { return now - held.since > kTime; });
}

void HeldReads::forget(const Target& target) {
  let_go([&](const Held& held) {
    const auto& targets = held.read->targets;
    return std::any_of(targets.begin(), targets.end(), [&](const auto& one) { return one.get() == &target; });
  });
}

void HeldReads::clear() {
  std::unordered_map<std::uint64_t, Held> gone;
  const std::lock_guard lock(mutex_);
  cleared_ = true;
  gone.swap(held_);
}

std::size_t HeldReads::held() const {
  const std::lock_guard lock(mutex_);
  return static_cast<std::size_t>(
      std::count_if(held_.begin(), held_.end(), [](const auto& one) { return one.second.read.has_value(); }));
}

}  // namespace ff::fs3::io
