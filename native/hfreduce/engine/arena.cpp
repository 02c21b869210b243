#include "hfreduce/engine/arena.hpp"

#include <algorithm>
#include <iterator>

namespace ff::hfreduce {
namespace {

constexpr std::size_t kPage = 4096;

std::size_t round_up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

Arena& Arena::of_process() {
  static Arena* arena = new Arena;  // never destroyed: tensors may outlive static destructors
  return *arena;
}

char* Arena::take(Region& region, std::size_t bytes) {
  const auto fit =
      std::find_if(region.free.begin(), region.free.end(), [&](const auto& hole) { return hole.second >= bytes; });
  if (fit == region.free.end()) return nullptr;
  const auto [offset, size] = *fit;
  region.free.erase(fit);
  if (size > bytes) region.free.emplace(offset + bytes, size - bytes);
  region.used.emplace(offset, bytes);
  return region.memory.data() + offset;
}

char* Arena::allocate(std::size_t bytes) {
  bytes = round_up(std::max<std::size_t>(bytes, 1), kAlignment);
  const std::lock_guard lock(mutex_);
  for (const auto& region : regions_) {
    if (char* block = take(*region, bytes)) return block;
  }
  const std::size_t size = std::max(kSegmentBytes, round_up(bytes, kPage));
  auto region = std::make_unique<Region>(Region{Segment::create("fireflyer-arena", size), {{0, size}}, {}});
  by_address_.emplace(region->memory.data(), static_cast<std::int32_t>(regions_.size()));
  regions_.push_back(std::move(region));
  return take(*regions_.back(), bytes);
}

void Arena::release(char* block) {
  const std::lock_guard lock(mutex_);
  const auto owner = std::prev(by_address_.upper_bound(block));
  Region& region = *regions_[static_cast<std::size_t>(owner->second)];
  auto used = region.used.find(static_cast<std::size_t>(block - owner->first));
  std::size_t offset = used->first, size = used->second;
  region.used.erase(used);
  auto next = region.free.lower_bound(offset);
  if (next != region.free.end() && next->first == offset + size) {
    size += next->second;
    next = region.free.erase(next);
  }
  if (next != region.free.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      previous->second += size;
      return;
    }
  }
  region.free.emplace(offset, size);
}

std::optional<Arena::Place> Arena::find(const void* data, std::size_t bytes) const {
  const auto* p = static_cast<const char*>(data);
  const std::lock_guard lock(mutex_);
  auto after = by_address_.upper_bound(p);
  if (after == by_address_.begin()) return std::nullopt;
  const auto& [start, number] = *std::prev(after);
  const std::size_t size = regions_[static_cast<std::size_t>(number)]->memory.size();
  const auto offset = static_cast<std::size_t>(p - start);
  if (offset > size || bytes > size - offset) return std::nullopt;
  return Place{number, offset};
}

char* Arena::address(std::int32_t segment) const {
  const std::lock_guard lock(mutex_);
  return regions_.at(static_cast<std::size_t>(segment))->memory.data();
}

std::size_t Arena::bytes_of(std::int32_t segment) const {
  const std::lock_guard lock(mutex_);
  return regions_.at(static_cast<std::size_t>(segment))->memory.size();
}

int Arena::descriptor(std::int32_t segment) const {
  const std::lock_guard lock(mutex_);
  return regions_.at(static_cast<std::size_t>(segment))->memory.fd();
}

std::size_t Arena::reserved_bytes() const {
  const std::lock_guard lock(mutex_);
  std::size_t total = 0;
  for (const auto& region : regions_) total += region->memory.size();
  return total;
}

}  // namespace ff::hfreduce
