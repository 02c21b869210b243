// Memory for zero-copy tensors: blocks inside segments that peers can map.
//
// One arena per process. Segments are numbered from 0, never move and never shrink before the process ends. Freed
// blocks are merged with their neighbours and reused. All functions are thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/memory/segment.hpp"

namespace ff::hfreduce {

class Arena {
 public:
  static constexpr std::size_t kAlignment = 128;          // of every block
  static constexpr std::size_t kSegmentBytes = 8u << 20;  // smallest segment

  struct Place {
    std::int32_t segment;
    std::uint64_t offset;
  };

  static Arena& of_process();

  // Throws Code::no_space. A block of 0 bytes takes one alignment unit.
  char* allocate(std::size_t bytes);
  // REQUIRES: `block` came from allocate() and is freed once.
  void release(char* block);
  // Returns the place of `bytes` from `data` on, if they lie wholly inside one segment.
  std::optional<Place> find(const void* data, std::size_t bytes) const;
  char* address(std::int32_t segment) const;  // start of a segment
  std::size_t bytes_of(std::int32_t segment) const;
  // Returns the descriptor to pass to peers; the arena owns it.
  int descriptor(std::int32_t segment) const;
  std::size_t reserved_bytes() const;

 private:
  struct Region {
    Segment memory;
    std::map<std::size_t, std::size_t> free;  // offset -> bytes, never adjacent
    std::map<std::size_t, std::size_t> used;  // offset -> bytes
  };

  char* take(Region& region, std::size_t bytes);

  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Region>> regions_;    // index = segment number
  std::map<const char*, std::int32_t> by_address_;  // start of the mapping -> number
};

}  // namespace ff::hfreduce
