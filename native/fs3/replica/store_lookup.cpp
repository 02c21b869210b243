#include "fs3/replica/store_lookup.hpp"

#include <map>
#include <optional>
#include <utility>

namespace ff::fs3::replica {

namespace {

constexpr std::size_t kPage = 4096;

Entry known(const store::Entry& entry) {
  return {entry.chunk,           entry.committed.version, entry.committed.length, entry.committed.crc,
          entry.pending.version, entry.pending.remove,    entry.pending.crc};
}

}  // namespace

Entry StoreLookup::entry(ChunkId chunk) const {
  Entry entry = known(store_.entry(chunk));
  entry.chunk = chunk;
  return entry;
}

void StoreLookup::page(ChunkId after, std::size_t limit, std::vector<Entry>& to) const {
  const auto from = after.inode != 0 ? std::optional(after) : std::nullopt;
  for (const store::Entry& entry : store_.page(from, limit)) {
    to.push_back(known(entry));
    // Lost contents: another CRC, so that the entry differs from other targets' entries and a sync transfers the chunk.
    if (entry.committed.lost) to.back().crc = ~entry.committed.crc;
  }
}

Tagged StoreLookup::tag(std::uint64_t client, std::uint32_t channel) const {
  const std::optional<store::Tagged> tagged = store_.tag(client, channel);
  return tagged ? Tagged{tagged->tag, tagged->chunk, tagged->version} : Tagged{};
}

std::vector<Pending> StoreLookup::pendings() const {
  std::vector<Pending> all;
  std::optional<ChunkId> after;
  for (;;) {
    const std::vector<store::Entry> entries = store_.page(after, kPage);
    for (const store::Entry& entry : entries) {
      if (entry.pending.version == 0) continue;
      all.push_back({entry.chunk, entry.pending.version, entry.pending.length, entry.pending.remove, {}});
    }
    if (entries.size() < kPage) break;
    after = entries.back().chunk;
  }
  if (all.empty()) return all;
  std::map<std::pair<ChunkId, Version>, Tag> tags;
  for (const store::Tagged& tagged : store_.tags()) tags[{tagged.chunk, tagged.version}] = tagged.tag;
  for (Pending& pending : all) {
    if (const auto tag = tags.find({pending.chunk, pending.version}); tag != tags.end()) pending.tag = tag->second;
  }
  return all;
}

}  // namespace ff::fs3::replica
