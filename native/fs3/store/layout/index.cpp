#include "fs3/store/layout/index.hpp"

#include <algorithm>
#include <iterator>

namespace ff::fs3::store {

std::size_t Index::Leaf::lower_bound(ChunkId chunk) const {
  const auto end = entries.begin() + count;
  return static_cast<std::size_t>(
      std::lower_bound(entries.begin(), end, chunk,
                       [](const IndexEntry& entry, ChunkId id) { return entry.chunk() < id; }) -
      entries.begin());
}

Index::Leaves::iterator Index::leaf_of(ChunkId chunk) {
  auto at = leaves_.upper_bound(chunk);
  return at == leaves_.begin() ? at : std::prev(at);
}

IndexEntry* Index::find(ChunkId chunk) {
  if (leaves_.empty()) return nullptr;
  Leaf& leaf = *leaf_of(chunk)->second;
  const std::size_t at = leaf.lower_bound(chunk);
  return at < leaf.count && leaf.entries[at].chunk() == chunk ? &leaf.entries[at] : nullptr;
}

const IndexEntry* Index::after(ChunkId chunk) const {
  if (leaves_.empty()) return nullptr;
  auto leaf = const_cast<Index*>(this)->leaf_of(chunk);
  std::size_t at = leaf->second->lower_bound(chunk);
  if (at < leaf->second->count && leaf->second->entries[at].chunk() == chunk) ++at;
  if (at < leaf->second->count) return &leaf->second->entries[at];
  ++leaf;
  return leaf == const_cast<Index*>(this)->leaves_.end() ? nullptr : &leaf->second->entries[0];
}

void Index::insert(Leaf& leaf, std::size_t at, const IndexEntry& entry) {
  std::copy_backward(leaf.entries.begin() + static_cast<std::ptrdiff_t>(at), leaf.entries.begin() + leaf.count,
                     leaf.entries.begin() + leaf.count + 1);
  leaf.entries[at] = entry;
  ++leaf.count;
}

// Makes room in a full leaf; returns the leaf for `chunk`. If `chunk` follows the last entry of the index, no entry
// moves, so that chunks in ascending order fill their leaves.
Index::Leaf& Index::split(Leaves::iterator at, ChunkId chunk) {
  Leaf& full = *at->second;
  auto fresh = std::make_unique<Leaf>();
  Leaf& right = *fresh;
  const bool in_order = full.entries[kLeaf - 1].chunk() < chunk && std::next(at) == leaves_.end();
  const std::uint32_t moved = in_order ? 0 : kLeaf / 2;
  std::copy_n(full.entries.begin() + (kLeaf - moved), moved, right.entries.begin());
  right.count = moved;
  full.count -= moved;
  const ChunkId first = in_order ? chunk : right.entries[0].chunk();
  leaves_.emplace_hint(std::next(at), first, std::move(fresh));
  return chunk < first ? full : right;
}

void Index::put(const IndexEntry& entry) {
  if (leaves_.empty()) leaves_.emplace(entry.chunk(), std::make_unique<Leaf>());
  auto at = leaf_of(entry.chunk());
  if (entry.chunk() < at->first) {  // before all entries: lower the first leaf's key
    auto node = leaves_.extract(at);
    node.key() = entry.chunk();
    at = leaves_.insert(std::move(node)).position;
  }
  Leaf* leaf = at->second.get();
  std::size_t place = leaf->lower_bound(entry.chunk());
  if (place < leaf->count && leaf->entries[place].chunk() == entry.chunk()) {
    leaf->entries[place] = entry;
    return;
  }
  if (leaf->count == kLeaf) {
    leaf = &split(at, entry.chunk());
    place = leaf->lower_bound(entry.chunk());
  }
  insert(*leaf, place, entry);
  ++size_;
}

void Index::erase(ChunkId chunk) {
  if (leaves_.empty()) return;
  const auto at = leaf_of(chunk);
  Leaf& leaf = *at->second;
  const std::size_t place = leaf.lower_bound(chunk);
  if (place == leaf.count || leaf.entries[place].chunk() != chunk) return;
  std::copy(leaf.entries.begin() + static_cast<std::ptrdiff_t>(place) + 1, leaf.entries.begin() + leaf.count,
            leaf.entries.begin() + static_cast<std::ptrdiff_t>(place));
  --leaf.count;
  --size_;
  merge(at);
}

// Joins the leaf with its right or left neighbour if both fit in one leaf with room to grow.
void Index::merge(Leaves::iterator at) {
  if (at->second->count == 0) {
    leaves_.erase(at);
    return;
  }
  for (auto left : {at, at == leaves_.begin() ? at : std::prev(at)}) {
    const auto right = std::next(left);
    if (right == leaves_.end() || left->second->count + right->second->count > kLeaf * 7 / 8) continue;
    std::copy_n(right->second->entries.begin(), right->second->count,
                left->second->entries.begin() + left->second->count);
    left->second->count += right->second->count;
    leaves_.erase(right);
    return;
  }
}

std::uint64_t Index::memory() const {
  constexpr std::uint64_t kNode =
      4 * sizeof(void*) + sizeof(Leaves::value_type) + 2 * 16;  // with two allocations' overhead
  return leaves_.size() * (sizeof(Leaf) + kNode);
}

}  // namespace ff::fs3::store
