// The CRCs of a Reading, and a cache of those read recently.
//
// Thread contract: Crcs like a vector; CrcPages has a lock, under which it takes no other lock.
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

// A vector that stores a few CRCs inline, so that a read of a block or two allocates no heap memory. Initially zeros.
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

// A cache of CRC table pages as they are in the files, at most kPages * kPage CRCs. A version's part of a page does not
// change while the version has the extent. So an entry is always correct for its key.
class CrcPages {
 public:
  static constexpr std::uint32_t kPage = 1024;  // CRCs
  struct Key {
    std::uint64_t extent = 0;  // packed
    std::uint32_t page = 0;    // number of the page in the extent's CRC table
    std::uint32_t salt = 0, crc = 0;
    std::uint64_t version = 0;  // 0: none
    bool operator==(const Key&) const = default;
  };

  // Copies CRCs [first, first + to.size()) of the page; returns false if the page is not cached.
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
  // Returns a page's slot. Neighbouring pages do not evict each other.
  static std::size_t place(const Key& key) {
    return static_cast<std::size_t>(key.extent + key.extent / 65536 * 259 + key.page * 389) % kPages;
  }

  mutable std::mutex mutex_;
  std::array<Page, kPages> pages_;
};

}  // namespace ff::fs3::store
