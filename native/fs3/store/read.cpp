// Reads of a store: index entries, bytes of chunks and their CRCs, and the check of a chunk for the scrub.
#include <algorithm>
#include <array>
#include <cstring>

#include "base/crc/crc32c.hpp"
#include "base/error.hpp"
#include "fs3/store/core.hpp"
#include "fs3/store/fill.hpp"

namespace ff::fs3::store {
namespace {

VersionInfo info(const IndexEntry& entry) {
  return {entry.version, entry.chain_version, entry.length, entry.crc, false, (entry.flags & IndexEntry::kLost) != 0};
}

}  // namespace

Core::~Core() {
  for (const auto& [packed, file] : files_) disk_.close(file);
  if (log_ != kNoFile) disk_.close(log_);
  if (log_copy_ != kNoFile) disk_.close(log_copy_);
}

File Core::file_of(Extent extent) {
  extent.slot = 0;
  {
    const std::shared_lock lock(files_mutex_);
    const auto found = files_.find(extent.packed());
    if (found != files_.end()) return found->second;
  }
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

// Like read_crcs, but takes the CRCs of a few blocks from cached pages.
Crcs Core::crcs_of(const IndexEntry& entry, std::uint32_t first, std::uint32_t end, bool cached) {
  constexpr std::uint32_t kPage = CrcPages::kPage, kFew = 16;
  const std::uint32_t in_table = blocks_of(entry.length) - 1, page = first / kPage;
  const std::uint32_t stored = std::min(end, in_table) - std::min(first, in_table);
  Crcs crcs(end - first);
  const std::span<std::uint32_t> to(crcs.data(), stored);
  if (cached && stored != 0 && stored <= kFew && (first + stored - 1) / kPage == page) {
    const CrcPages::Key key{entry.extent().packed(), page, entry.salt, entry.crc, entry.version};
    if (!crc_pages_.find(key, first % kPage, to)) {
      std::vector<std::uint32_t> all(std::min(kPage, in_table - page * kPage));
      read_bytes(entry.extent(), entry.extent().capacity() + 4 * std::uint64_t{page * kPage}, all.data(),
                 4 * all.size());
      std::copy_n(all.data() + first % kPage, stored, to.data());
      crc_pages_.keep(key, std::move(all));
    }
  } else if (stored != 0) {
    read_bytes(entry.extent(), entry.extent().capacity() + 4 * std::uint64_t{first}, to.data(), 4 * to.size());
  }
  for (std::uint32_t& crc : to) crc ^= entry.salt;
  if (end > in_table) crcs.data()[stored] = entry.last_crc;
  return crcs;
}

// Finds the requested version; returns false if there is none.
bool Core::look_up(const ReadAsk& ask, IndexEntry& entry) const {
  const IndexEntry* const found = index_.find(ask.chunk);
  if (found == nullptr) return false;
  entry = *found;
  if (ask.version != 0 && entry.version != ask.version) {
    const auto pending = pending_.find(ask.chunk);
    if (pending == pending_.end() || pending->second.entry.version != ask.version || pending->second.removes)
      return false;
    entry = pending->second.entry;
  }
  return entry.version != 0;
}

// Fills the Reading with the blocks that cover the request. REQUIRES: the version's extent is held.
void Core::cover(const ReadAsk& ask, const IndexEntry& entry, bool cached) {
  Reading& reading = *ask.to;
  reading.version = entry.version;
  reading.chunk_length = entry.length;
  reading.status = entry.flags & IndexEntry::kLost ? Status::corrupt : Status::ok;
  if (reading.status != Status::ok || ask.offset >= entry.length || ask.length == 0) return;
  const std::uint32_t first = ask.offset / kBlock32;
  const std::uint32_t end = blocks_of(ask.offset + std::min(ask.length, entry.length - ask.offset));
  try {
    reading.crcs = crcs_of(entry, first, end, cached);
    reading.file = file_of(entry.extent());
  } catch (const Error&) {
    reading.status = Status::io_error;
    return;
  }
  reading.offset = first * kBlock32;
  reading.length = std::min(end * kBlock32, entry.length) - reading.offset;
  reading.position = entry.extent().position() + reading.offset;
}

void Core::read(std::span<const ReadAsk> asks, bool cached) {
  std::array<IndexEntry, 64> entries;  // version 0: none found
  while (!asks.empty()) {
    const auto some = asks.first(std::min(asks.size(), entries.size()));
    asks = asks.subspan(some.size());
    for (const ReadAsk& ask : some) *ask.to = Reading();
    {
      const std::shared_lock lock(mutex_);
      const std::lock_guard held(held_mutex_);
      for (std::size_t n = 0; n < some.size(); ++n) {
        if (!look_up(some[n], entries[n])) {
          entries[n].version = 0;
        } else if (entries[n].extent().exists()) {
          some[n].to->core_ = this;
          some[n].to->held_ = entries[n].extent().packed();
          ++held_[some[n].to->held_].count;
        }
      }
    }
    for (std::size_t n = 0; n < some.size(); ++n) {
      if (entries[n].version != 0) cover(some[n], entries[n], cached);
    }
  }
}

Status Core::check(ChunkId chunk) {
  Reading reading;
  const ReadAsk ask{chunk, 0, 0, static_cast<std::uint32_t>(kLargestChunk), &reading};
  read({&ask, 1}, false);
  if (reading.status != Status::ok) return reading.status;
  // The damage may be in cached CRCs, so the next reader must read the CRCs from the disk.
  if (reading.length != 0)
    crc_pages_.forget(reading.held_, static_cast<std::uint32_t>(reading.crcs.size() / CrcPages::kPage + 1));
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
  return !found || whole == expected ? Status::ok : Status::corrupt;  // !found: the version was replaced meanwhile
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

std::optional<Last> Core::last(ChunkId upto, std::uint32_t stride) const {
  std::optional<Last> found;
  const std::shared_lock lock(mutex_);
  index_.down(upto, [&](const IndexEntry& entry) {
    if (entry.inode != upto.inode) return false;
    if (!found) {
      if (entry.version != 0) found = Last{entry.chunk(), entry.length, 1};
      return !found || stride != 0;
    }
    const bool next = entry.version != 0 && entry.index + std::uint64_t{found->run} * stride == found->chunk.index;
    if (next) ++found->run;
    return next && found->run < kMostRun;
  });
  return found;
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
  statistics.mended = mended_;
  const std::lock_guard held(held_mutex_);
  statistics.held = held_.size();
  return statistics;
}

}  // namespace ff::fs3::store
