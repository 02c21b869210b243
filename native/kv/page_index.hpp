// Index of a page cache: 16-byte digest of a key -> segment, place, size and checksum of the page.
//
// Open addressing with linear probing: 40 bytes a slot, at most 3 of 4 slots taken. A segment is a number that the caller
// chooses and never uses twice. Forgetting a segment takes constant time: a slot of an unknown segment counts as no page,
// and is dropped when the table is rebuilt. A page costs 53 to 64 bytes after a rebuild, and at most
// 64 + 40 / 0.75 during a rebuild.
//
// Thread contract: the caller serialises all calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace ff::kv {

constexpr std::size_t kDigest = 16;
constexpr std::uint64_t kPageUnit = 4096;  // the offset of a page is a multiple of this

struct Page {
  std::uint32_t segment = 0;
  std::uint32_t unit = 0;  // offset / kPageUnit
  std::uint32_t bytes = 0;
  std::uint32_t crc = 0;  // CRC32C of the digest and the bytes
  std::uint32_t salt = 0;
  std::uint16_t position = 0;  // position in its prefix, in pages: 0 is the head of the prefix
  std::uint8_t hits = 0;       // uses since the page was written, at most 255
};

class PageIndex {
 public:
  // Begins a segment. Throws Error(invalid) if it is known.
  void begin(std::uint32_t segment);
  // Adds a page of a segment that has begun; a known digest moves to this page.
  void insert(std::string_view digest, const Page& page);
  std::optional<Page> find(std::string_view digest) const;
  void hit(std::string_view digest);  // counts a use
  bool holds(std::string_view digest) const { return probe(digest) != nullptr; }
  // Removes a page if it lies in this segment.
  void remove(std::string_view digest, std::uint32_t segment);
  // Removes a segment with its pages, in constant time.
  void forget(std::uint32_t segment);

  std::size_t pages() const { return pages_; }
  std::size_t memory() const { return slots_.capacity() * sizeof(Slot); }
  std::uint64_t bytes_of(std::uint32_t salt) const;

 private:
  struct Slot {
    char digest[kDigest];
    std::uint32_t segment, unit, bytes, crc, salt;
    std::uint16_t position;
    std::uint8_t hits;
    bool taken;
  };
  static_assert(sizeof(Slot) == 40);
  struct Segment {
    std::size_t pages = 0;
    std::vector<std::pair<std::uint32_t, std::uint64_t>> usage;  // salt, bytes
  };

  std::size_t home(const char* digest) const;
  std::size_t after(std::size_t at) const { return at + 1 == slots_.size() ? 0 : at + 1; }
  const Slot* probe(std::string_view digest) const;
  void count(std::uint32_t segment, std::uint32_t salt, std::int64_t pages, std::int64_t bytes);
  void lay();  // rebuilds the table, with more slots if necessary

  std::vector<Slot> slots_;
  std::size_t taken_ = 0, pages_ = 0;
  std::unordered_map<std::uint32_t, Segment> segments_;
  std::unordered_map<std::uint32_t, std::uint64_t> usage_;  // bytes, by salt
};

}  // namespace ff::kv
