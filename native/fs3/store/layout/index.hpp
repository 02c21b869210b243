// The committed versions of all chunks, ordered by id: sorted leaves of 64 entries in a map.
//
// Thread contract: not thread-safe; the Core's mutex guards it. A pointer to an entry is valid until the next put or
// erase.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>

#include "fs3/store/layout/space.hpp"
#include "fs3/types.hpp"

namespace ff::fs3::store {

// Also the form of an entry in a snapshot: little-endian, without padding.
struct IndexEntry {
  enum Flags : std::uint8_t {
    kSealed = 1,  // bytes beyond the length belong to another version: no append in place
    kLost = 2,    // two chunks claimed its extent, so it has no bytes
  };
  std::uint64_t inode = 0;
  std::uint32_t index = 0;
  ChainVersion chain_version = 0;
  Version version = 0;  // 0: only a pending version exists
  std::uint32_t length = 0;
  std::uint32_t crc = 0;       // CRC32C of the whole chunk
  std::uint32_t last_crc = 0;  // CRC32C of the chunk's last block
  std::uint32_t salt = 0;      // salt of the extent's CRC table
  std::uint32_t file = 0;
  std::uint16_t slot = 0;
  std::uint8_t size_class = kNoClass;
  std::uint8_t flags = 0;

  ChunkId chunk() const { return {inode, index}; }
  Extent extent() const { return {file, slot, size_class}; }
  void set_extent(Extent extent) {
    file = extent.file;
    slot = extent.slot;
    size_class = extent.size_class;
  }
  bool operator==(const IndexEntry&) const = default;
};
static_assert(sizeof(IndexEntry) == 48);

class Index {
 public:
  IndexEntry* find(ChunkId chunk);
  const IndexEntry* find(ChunkId chunk) const { return const_cast<Index*>(this)->find(chunk); }
  const IndexEntry* first() const { return leaves_.empty() ? nullptr : &leaves_.begin()->second->entries[0]; }
  const IndexEntry* after(ChunkId chunk) const;  // the first entry with a larger id
  // Passes entries to `each`, from the one at or before `chunk` downwards, until `each` returns false.
  template <class Each>
  void down(ChunkId chunk, Each each) const;
  void put(const IndexEntry& entry);  // inserts the entry, or replaces the one with the same id
  void erase(ChunkId chunk);          // does nothing if the entry is missing
  std::uint64_t size() const { return size_; }
  std::uint64_t memory() const;  // bytes

 private:
  static constexpr std::size_t kLeaf = 64;
  struct Leaf {
    std::uint32_t count = 0;
    std::array<IndexEntry, kLeaf> entries;
    std::size_t lower_bound(ChunkId chunk) const;
  };
  // The key of a leaf is at most its first id, and larger than all ids of the leaves before.
  using Leaves = std::map<ChunkId, std::unique_ptr<Leaf>>;
  static void insert(Leaf& leaf, std::size_t at, const IndexEntry& entry);
  Leaves::iterator leaf_of(ChunkId chunk);  // the leaf that has `chunk` or would get it. REQUIRES: not empty
  Leaf& split(Leaves::iterator at, ChunkId chunk);
  void merge(Leaves::iterator at);

  Leaves leaves_;
  std::uint64_t size_ = 0;
};

template <class Each>
void Index::down(ChunkId chunk, Each each) const {
  if (leaves_.empty()) return;
  Leaves::const_iterator leaf = const_cast<Index*>(this)->leaf_of(chunk);
  std::size_t at = leaf->second->lower_bound(chunk);
  if (at < leaf->second->count && leaf->second->entries[at].chunk() == chunk) ++at;
  for (;;) {
    while (at > 0) {
      if (!each(leaf->second->entries[--at])) return;
    }
    if (leaf == leaves_.begin()) return;
    --leaf;
    at = leaf->second->count;
  }
}

}  // namespace ff::fs3::store
