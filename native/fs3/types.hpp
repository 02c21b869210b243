// Types and names that chunk store, replica and wire share. docs/internals/fs3-chain.md and docs/internals/fs3-store.md
// define their meaning.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace ff::fs3 {

inline constexpr std::size_t kBlock = 4096;  // bytes that one CRC32C covers
inline constexpr std::size_t kLargestChunk = std::size_t{64} << 20;
inline constexpr std::uint32_t kLastIndex = ~std::uint32_t{0};  // largest index of a chunk
inline constexpr std::uint32_t kMostRun = 4096;  // maximum number of consecutive chunks that one QUERY_LAST counts

struct ChunkId {
  std::uint64_t inode = 0;
  std::uint32_t index = 0;
  auto operator<=>(const ChunkId&) const = default;  // the order in which chunks are listed
};

using Version = std::uint64_t;  // of a chunk; 0: no such chunk
using ChainVersion = std::uint32_t;
using TargetId = std::uint32_t;

// Idempotency key: identifies a write for as long as its client may retry it. Each (client, channel) has at most one
// write in flight, and its `seq` grows with each write. client 0: no tag.
struct Tag {
  std::uint64_t client = 0;
  std::uint32_t channel = 0;
  std::uint64_t seq = 0;
  auto operator<=>(const Tag&) const = default;
};

enum class Kind : std::uint8_t {
  write,     // bytes at an offset; fills a gap before them with zeros
  truncate,  // to a shorter length
  extend,    // to a greater length, with zeros
  remove,
  replace,  // sets the bytes and the version of the whole chunk, whatever it held before
};

enum class Status : std::uint8_t {
  ok,
  stale_routing,  // another chain version, a target with another role, or no lease
  duplicate,      // older than the newest write of its channel
  diverged,       // builds on a version that this replica does not have
  corrupt,        // stored bytes fail their CRC32C
  no_space,
  io_error,
  not_found,
  invalid,  // arguments that are invalid for every chunk
};

}  // namespace ff::fs3

template <>
struct std::hash<ff::fs3::ChunkId> {
  std::size_t operator()(const ff::fs3::ChunkId& id) const noexcept {
    std::uint64_t z = id.inode * 0x9e3779b97f4a7c15ull + id.index;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
};
