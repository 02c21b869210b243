#include "fs3/io/service/permits.hpp"

#include <sys/eventfd.h>

#include <algorithm>

namespace ff::fs3::io {

void Permits::join(std::span<const std::uint32_t> nodes) {
  std::lock_guard lock(mutex_);
  for (const std::uint32_t node : nodes) ++nodes_[node].asking;
}

void Permits::part(std::span<const std::uint32_t> nodes) {
  std::lock_guard lock(mutex_);
  for (const std::uint32_t node : nodes) {
    const auto found = nodes_.find(node);
    if (--found->second.asking == 0 && found->second.direct == 0) nodes_.erase(found);
  }
}

bool Permits::direct(std::uint32_t node) {
  std::lock_guard lock(mutex_);
  if (nodes_.size() > count_ || !line_.empty()) return false;
  const auto found = nodes_.find(node);
  if (found == nodes_.end()) return false;
  if (found->second.direct == 0) {
    if (used_ == count_) return false;
    take();
  }
  ++found->second.direct;
  return true;
}

void Permits::over(std::uint32_t node) {
  std::lock_guard lock(mutex_);
  const auto found = nodes_.find(node);
  if (--found->second.direct != 0) return;
  if (found->second.asking == 0) nodes_.erase(found);
  freed();
}

bool Permits::ask(int wake) {
  std::lock_guard lock(mutex_);
  if (used_ < count_ && line_.empty()) {
    take();
    return true;
  }
  line_.push_back(wake);
  return false;
}

void Permits::give_back() {
  std::lock_guard lock(mutex_);
  freed();
}

std::uint64_t Permits::leave(int wake) {
  std::lock_guard lock(mutex_);
  std::erase(line_, wake);
  eventfd_t told = 0;
  return ::eventfd_read(wake, &told) == 0 ? told : 0;
}

unsigned Permits::used() const {
  std::lock_guard lock(mutex_);
  return used_;
}

unsigned Permits::most() const {
  std::lock_guard lock(mutex_);
  return most_;
}

void Permits::take() { most_ = std::max(most_, ++used_); }

void Permits::freed() {
  if (line_.empty()) {
    --used_;
    return;
  }
  ::eventfd_write(line_.front(), 1);
  line_.pop_front();
}

}  // namespace ff::fs3::io
