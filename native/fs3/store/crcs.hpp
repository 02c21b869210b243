// The CRCs of a Reading, and those that were read lately.
//
// Thread contract: Crcs as a vector's; CrcPages has a lock of its own, over nothing.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

namespace ff::fs3::store {

// Few lie in the object itself: a read of a block or two takes no memory from the heap. Zeros at first.
class Crcs {
 public:
  Crcs() = default;
  explicit Crcs(std::size_t count) : count_(count) {
    if (count > kFew) many_ = std::make_unique<std::uint32_t[]>(count);
  }
  Crcs(Crcs&& other) noexcept { *this = std::move(other); }
  Crcs& operator=(Crcs&& other) noexcept {
    count_ = std::exchange(other.count_, 0);
    few_ = other.few_;
    many_ = std::move(other.many_);
    return *this;
  }

  std::size_t size() const { return count_; }
  bool empty() const { return count_ == 0; }
  std::uint32_t* data() { return many_ ? many_.get() : few_.data(); }
  const std::uint32_t* data() const { return many_ ? many_.get() : few_.data(); }
  const std::uint32_t* begin() const { return data(); }
  const std::uint32_t* end() const { return data() + count_; }
  std::uint32_t operator[](std::size_t n) const { return data()[n]; }
  operator std::span<const std::uint32_t>() const { return {data(), count_}; }

 private:
  static constexpr std::size_t kFew = 2;
  std::size_t count_ = 0;
  std::array<std::uint32_t, kFew> few_{};
  std::unique_ptr<std::uint32_t[]> many_;
};

// Pages of CRC tables as they lie in the files, at most kPages * kPage CRCs. What a page holds of a version does not
// change as long as that has the extent, so an entry is right for its key, and never looked up with another.
class CrcPages {
 public:
  static constexpr std::uint32_t kPage = 1024;  // CRCs
  struct Key {
    std::uint64_t extent = 0;  // packed
    std::uint32_t page = 0;    // of the table
    std::uint32_t salt = 0, crc = 0;
    std::uint64_t version = 0;  // 0: none
    bool operator==(const Key&) const = default;
  };

  // CRCs [first, first + to.size()) of the page; false if it is not here.
  bool find(const Key& key, std::uint32_t first, std::span<std::uint32_t> to) const {
    const std::lock_guard lock(mutex_);
    const Page& page = pages_[place(key)];
    if (page.key != key || first + to.size() > page.crcs.size()) return false;
    std::copy_n(page.crcs.data() + first, to.size(), to.data());
    return true;
  }
  void keep(const Key& key, std::vector<std::uint32_t> crcs) {
    const std::lock_guard lock(mutex_);
    pages_[place(key)] = {key, std::move(crcs)};
  }
  void forget(std::uint64_t extent, std::uint32_t pages) {
    const std::lock_guard lock(mutex_);
    for (std::uint32_t n = 0; n < pages; ++n) {
      Page& page = pages_[place({.extent = extent, .page = n})];
      if (page.key.extent == extent) page = {};
    }
  }

 private:
  static constexpr std::size_t kPages = 1024;
  struct Page {
    Key key;
    std::vector<std::uint32_t> crcs;
  };
  // Neighbours do not displace each other.
  static std::size_t place(const Key& key) {
    return static_cast<std::size_t>(key.extent + key.extent / 65536 * 259 + key.page * 389) % kPages;
  }

  mutable std::mutex mutex_;
  std::array<Page, kPages> pages_;
};

}  // namespace ff::fs3::store
