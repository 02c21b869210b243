// Reading: entries, bytes, CRCs, the scrub's check.
#include <algorithm>
#include <cstring>

#include "base/crc32c.hpp"
#include "base/error.hpp"
#include "fs3/store/core.hpp"
#include "fs3/store/fill.hpp"

namespace ff::fs3::store {
namespace {

VersionInfo info(const IndexEntry& entry) { return {entry.version, entry.chain_version, entry.length, entry.crc, false}; }

}  // namespace

Core::~Core() {
  for (const auto& [packed, file] : files_) disk_.close(file);
  if (log_ != kNoFile) disk_.close(log_);
}

File Core::file_of(Extent extent) {
  extent.slot = 0;
  const std::lock_guard lock(files_mutex_);
  const auto found = files_.find(extent.packed());
  if (found != files_.end()) return found->second;
  File file = disk_.open(extent.file_name(), false);
  if (file == kNoFile) {
    file = disk_.open(extent.file_name(), true);
    names_changed_ = true;
  }
  files_.emplace(extent.packed(), file);
  return file;
}

void Core::read_bytes(Extent extent, std::uint64_t offset, void* to, std::size_t bytes) {
  const std::size_t got = disk_.read(file_of(extent), extent.position() + offset, to, bytes);
  std::memset(static_cast<char*>(to) + got, 0, bytes - got);
}

std::vector<std::uint32_t> Core::read_crcs(const IndexEntry& entry, std::uint32_t first, std::uint32_t end) {
  std::vector<std::uint32_t> crcs(end > first ? end - first : 0);
  if (crcs.empty()) return crcs;
  const bool last = end == blocks_of(entry.length);
  const std::size_t stored = crcs.size() - (last ? 1 : 0);
  if (stored > 0) {
    read_bytes(entry.extent(), entry.extent().capacity() + 4 * std::uint64_t{first}, crcs.data(), 4 * stored);
    for (std::size_t i = 0; i < stored; ++i) crcs[i] ^= entry.salt;
  }
  if (last) crcs.back() = entry.last_crc;
  return crcs;
}

Reading Core::read(ChunkId chunk, Version version, std::uint32_t offset, std::uint32_t length) {
  Reading reading;
  IndexEntry entry;
  {
    const std::shared_lock lock(mutex_);
    const IndexEntry* const found = index_.find(chunk);
    if (found == nullptr) return reading;
    entry = *found;
    if (version != 0 && entry.version != version) {
      const auto pending = pending_.find(chunk);
      if (pending == pending_.end() || pending->second.entry.version != version || pending->second.removes) return reading;
      entry = pending->second.entry;
    }
    if (entry.version == 0) return reading;
    if (entry.extent().exists()) {
      hold(entry.extent());
      reading.core_ = this;
      reading.held_ = entry.extent().packed();
    }
  }
  reading.version = entry.version;
  reading.chunk_length = entry.length;
  reading.status = entry.flags & IndexEntry::kLost ? Status::corrupt : Status::ok;
  if (reading.status != Status::ok || offset >= entry.length || length == 0) return reading;
  const std::uint32_t first = offset / kBlock32, end = blocks_of(offset + std::min(length, entry.length - offset));
  try {
    reading.crcs = read_crcs(entry, first, end);
    reading.file = file_of(entry.extent());
  } catch (const Error&) {
    reading.status = Status::io_error;
    return reading;
  }
  reading.offset = first * kBlock32;
  reading.length = std::min(end * kBlock32, entry.length) - reading.offset;
  reading.position = entry.extent().position() + reading.offset;
  return reading;
}

Status Core::check(ChunkId chunk) {
  const Reading reading = read(chunk, 0, 0, static_cast<std::uint32_t>(kLargestChunk));
  if (reading.status != Status::ok) return reading.status;
  std::uint32_t expected = 0, whole = 0;
  bool found = false;
  {
    const std::shared_lock lock(mutex_);
    const IndexEntry* const entry = index_.find(chunk);
    found = entry != nullptr && entry->version == reading.version;
    if (found) expected = entry->crc;
  }
  constexpr std::uint32_t kPiece = std::uint32_t{1} << 20;
  std::vector<std::byte> bytes(std::min(kPiece, reading.length));
  for (std::uint32_t at = 0; at < reading.length; at += kPiece) {
    const std::uint32_t size = std::min(kPiece, reading.length - at);
    try {
      const std::size_t got = disk_.read(reading.file, reading.position + at, bytes.data(), size);
      std::memset(bytes.data() + got, 0, size - got);
    } catch (const Error&) {
      return Status::io_error;
    }
    for (std::uint32_t in = 0; in < size; in += kBlock32) {
      const std::uint32_t block = std::min(kBlock32, size - in), crc = reading.crcs[(at + in) / kBlock];
      if (crc32c(0, bytes.data() + in, block) != crc) return Status::corrupt;
      whole = crc32c_combine(whole, crc, block);
    }
  }
  return !found || whole == expected ? Status::ok : Status::corrupt;  // !found: replaced meanwhile
}

Entry Core::entry(ChunkId chunk) const {
  Entry entry{chunk, {}, {}};
  const std::shared_lock lock(mutex_);
  if (const IndexEntry* const found = index_.find(chunk)) entry.committed = info(*found);
  const auto pending = pending_.find(chunk);
  if (pending != pending_.end()) {
    entry.pending = info(pending->second.entry);
    entry.pending.remove = pending->second.removes;
  }
  return entry;
}

std::vector<Entry> Core::page(std::optional<ChunkId> after, std::size_t limit) const {
  std::vector<Entry> entries;
  const std::shared_lock lock(mutex_);
  const IndexEntry* at = after ? index_.after(*after) : index_.first();
  for (; at != nullptr && entries.size() < limit; at = index_.after(at->chunk())) {
    Entry& entry = entries.emplace_back(Entry{at->chunk(), info(*at), {}});
    if (pending_.empty()) continue;
    const auto pending = pending_.find(at->chunk());
    if (pending == pending_.end()) continue;
    entry.pending = info(pending->second.entry);
    entry.pending.remove = pending->second.removes;
  }
  return entries;
}

std::optional<Entry> Core::last(std::uint64_t inode) const {
  const std::shared_lock lock(mutex_);
  const IndexEntry* at = index_.at_or_before({inode, ~std::uint32_t{0}});
  while (at != nullptr && at->inode == inode && at->version == 0)
    at = at->index == 0 ? nullptr : index_.at_or_before({inode, at->index - 1});
  if (at == nullptr || at->inode != inode) return std::nullopt;
  return Entry{at->chunk(), info(*at), {}};
}

Statistics Core::statistics() const {
  Statistics statistics;
  const std::shared_lock lock(mutex_);
  statistics.chunks = index_.size();
  statistics.bytes = bytes_;
  statistics.extents = space_.taken();
  statistics.extent_bytes = space_.taken_bytes();
  statistics.index_bytes = index_.memory();
  statistics.log_bytes = log_bytes_;
  const std::lock_guard held(held_mutex_);
  statistics.held = held_.size();
  return statistics;
}

}  // namespace ff::fs3::store
