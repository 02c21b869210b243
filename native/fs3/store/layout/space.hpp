// Free extents: each data file has extents of one size class. docs/internals/fs3-store.md, "Files".
//
// Thread contract: not thread-safe; the Core's mutex guards it.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <string>
#include <vector>

#include "fs3/types.hpp"

namespace ff::fs3::store {

inline constexpr std::uint8_t kClasses = 8;
inline constexpr std::uint8_t kNoClass = 0xFF;

inline constexpr std::uint64_t class_bytes(std::uint8_t size_class) { return kBlock << (2 * size_class); }
inline constexpr std::uint64_t table_bytes(std::uint8_t size_class) {
  return size_class == 0 ? 0 : (class_bytes(size_class) / kBlock * 4 + kBlock - 1) / kBlock * kBlock;
}
inline constexpr std::uint32_t slots_per_file(std::uint8_t size_class) {
  return size_class < 2 ? 65536 : static_cast<std::uint32_t>((std::uint64_t{1} << 30) / class_bytes(size_class));
}
inline constexpr std::uint8_t class_for(std::uint64_t bytes) {  // REQUIRES: 0 < bytes <= kLargestChunk
  std::uint8_t size_class = 0;
  while (class_bytes(size_class) < bytes) ++size_class;
  return size_class;
}

struct Extent {
  std::uint32_t file = 0;
  std::uint16_t slot = 0;
  std::uint8_t size_class = kNoClass;

  bool exists() const { return size_class < kClasses; }
  std::uint64_t capacity() const { return class_bytes(size_class); }
  std::uint64_t stride() const { return capacity() + table_bytes(size_class); }
  std::uint64_t position() const { return slot * stride(); }       // where its bytes begin in the file
  std::uint64_t table() const { return position() + capacity(); }  // where its CRC table begins in the file
  std::uint64_t packed() const { return std::uint64_t{size_class} << 56 | std::uint64_t{file} << 16 | slot; }
  static Extent unpack(std::uint64_t packed) {
    return {static_cast<std::uint32_t>(packed >> 16), static_cast<std::uint16_t>(packed),
            static_cast<std::uint8_t>(packed >> 56)};
  }
  std::string file_name() const { return "data-" + std::to_string(size_class) + "-" + std::to_string(file); }
  bool operator==(const Extent&) const = default;
};

class Space {
 public:
  Extent take(std::uint8_t size_class);  // takes the first free extent
  bool mark(Extent extent);              // marks the extent as taken; false if it was taken already
  void free(Extent extent);
  std::uint64_t taken() const { return taken_; }
  std::uint64_t taken_bytes() const { return taken_bytes_; }
  // Calls visit(first slot, slots) for each run of free extents among the first `slots` of a file.
  template <class Visit>
  void free_runs(std::uint8_t size_class, std::uint32_t file, std::uint32_t slots, const Visit& visit) const {
    const auto& files = classes_[size_class].files;
    for (std::uint32_t slot = 0; slot < slots;) {
      std::uint32_t end = slot;
      while (end < slots && (file >= files.size() || !files[file].has(end))) ++end;
      if (end > slot) visit(slot, end - slot);
      slot = end + 1;
    }
  }

 private:
  struct Map {
    std::vector<std::uint64_t> words;  // one bit per slot, set if taken; grows as slots are used
    std::uint32_t taken = 0;
    std::size_t first = 0;  // no word before this one has a free slot
    bool has(std::uint32_t slot) const {
      return slot / 64 < words.size() && (words[slot / 64] >> (slot % 64) & 1) != 0;
    }
  };
  struct Class {
    std::vector<Map> files;
    std::size_t first = 0;  // no file before this one has a free slot
  };
  std::array<Class, kClasses> classes_;
  std::uint64_t taken_ = 0, taken_bytes_ = 0;
};

}  // namespace ff::fs3::store
