#include "fs3/io/wire/pool.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <bit>

#include "base/error.hpp"

namespace ff::fs3::io {
namespace {

// Sizes are powers of two from 64 KiB on, plus one page: a payload of 4 MiB may begin anywhere in its first block.
constexpr std::size_t kPage = 4096;
constexpr std::size_t kMostKept = 1024;  // buffers; bounded so that returning one allocates no memory

std::size_t rounded(std::size_t bytes) {
  return std::max(std::size_t{64} << 10, std::bit_ceil(bytes > kPage ? bytes - kPage : bytes)) + kPage;
}

std::byte* map(std::size_t bytes) {
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw_errno("cannot allocate a buffer of " + std::to_string(bytes) + " bytes");
  return static_cast<std::byte*>(memory);
}

}  // namespace

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  if (this != &other) {
    release();
    pool_ = std::exchange(other.pool_, nullptr);
    data_ = other.data_;
    bytes_ = other.bytes_;
  }
  return *this;
}

void Buffer::release() noexcept {
  if (pool_ != nullptr) std::exchange(pool_, nullptr)->give_back(data_, bytes_);
}

Pool::Pool(std::size_t most) : most_(most) { free_.reserve(kMostKept); }

Pool::~Pool() {
  for (const auto& [bytes, data] : free_) ::munmap(data, bytes);
}

Buffer Pool::take(std::size_t bytes) {
  bytes = rounded(bytes);
  std::vector<std::pair<std::size_t, std::byte*>> dropped;
  std::byte* found = nullptr;
  {
    std::lock_guard lock(mutex_);
    if (out_ != 0 && out_ + bytes > most_) return {};
    const auto fitting =
        std::find_if(free_.rbegin(), free_.rend(), [&](const auto& one) { return one.first == bytes; });
    if (fitting != free_.rend()) {
      found = fitting->second;
      free_.erase(std::next(fitting).base());
      kept_ -= bytes;
    }
    out_ += bytes;
    while (!free_.empty() && out_ + kept_ > most_) {
      kept_ -= free_.front().first;
      dropped.push_back(free_.front());
      free_.erase(free_.begin());
    }
  }
  for (const auto& [size, data] : dropped) ::munmap(data, size);
  if (found == nullptr) {
    try {
      found = map(bytes);
    } catch (...) {
      std::lock_guard lock(mutex_);
      out_ -= bytes;
      throw;
    }
  }
  return Buffer(this, found, bytes);
}

std::size_t Pool::out() const {
  std::lock_guard lock(mutex_);
  return out_;
}

void Pool::when_free(std::function<void()> retry) {
  {
    std::lock_guard lock(mutex_);
    if (out_ != 0) {
      waiting_.push_back(std::move(retry));
      return;
    }
  }
  retry();  // all buffers came back in between
}

void Pool::give_back(std::byte* data, std::size_t bytes) noexcept {
  std::vector<std::function<void()>> waiting;
  bool kept = false;
  {
    std::lock_guard lock(mutex_);
    out_ -= bytes;
    waiting.swap(waiting_);
    if (out_ + kept_ + bytes <= most_ && free_.size() < free_.capacity()) {
      free_.emplace_back(bytes, data);
      kept_ += bytes;
      kept = true;
    }
  }
  if (!kept) ::munmap(data, bytes);
  for (const auto& retry : waiting) retry();
}

}  // namespace ff::fs3::io
