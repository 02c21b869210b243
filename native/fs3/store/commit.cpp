// The write path after the bytes are written: applying records to the state, the group commit, and freeing space.
#include <algorithm>
#include <array>
#include <utility>

#include "base/error.hpp"
#include "fs3/store/core.hpp"

namespace ff::fs3::store {
namespace {

Status status_of_log(const Error& error) {
  return error.code() == Code::no_space ? Status::no_space : Status::io_error;
}

}  // namespace

void Core::put_entry(const IndexEntry& entry) {
  if (const IndexEntry* const old = index_.find(entry.chunk())) bytes_ -= old->length;
  bytes_ += entry.length;
  index_.put(entry);
}

void Core::erase_entry(ChunkId chunk) {
  if (const IndexEntry* const old = index_.find(chunk)) bytes_ -= old->length;
  index_.erase(chunk);
}

void Core::keep_tag(const Tagged& tagged) {
  if (tagged.tag.client == 0) return;
  auto [at, fresh] = tags_.try_emplace({tagged.tag.client, tagged.tag.channel}, tagged);
  if (fresh) return;
  const Tagged& known = at->second;  // the two tags differ in seq only
  if (std::pair{known.tag.seq, known.version} <= std::pair{tagged.tag.seq, tagged.version}) at->second = tagged;
}

// Makes `entry` the committed version of its chunk; removes the chunk if `removes`.
void Core::install_version(const IndexEntry& entry, bool removes, std::vector<Extent>& freed) {
  const IndexEntry* const old = index_.find(entry.chunk());
  if (old != nullptr && old->extent().exists() && (removes || old->extent() != entry.extent()))
    freed.push_back(old->extent());
  if (removes) {
    erase_entry(entry.chunk());
    floor_ = std::max(floor_, entry.version);
  } else {
    put_entry(entry);
  }
}

void Core::give_up(ChunkId chunk, std::vector<Extent>& freed) {
  const auto pending = pending_.find(chunk);
  if (pending == pending_.end()) return;
  const Extent extent = pending->second.entry.extent();
  pending_.erase(pending);
  IndexEntry* const committed = index_.find(chunk);
  if (committed != nullptr && extent.exists() && committed->extent() == extent) committed->flags |= IndexEntry::kSealed;
  else if (extent.exists()) freed.push_back(extent);
  if (committed != nullptr && committed->version == 0) erase_entry(chunk);
}

void Core::install(const Record& r, std::vector<Extent>& freed) {
  switch (r.kind) {
    case RecordKind::begin: break;
    case RecordKind::apply: {
      IndexEntry entry{r.chunk.inode, r.chunk.index, r.chain_version,     r.version,
                       r.length,      r.crc,         r.last_crc,          r.salt,
                       r.extent.file, r.extent.slot, r.extent.size_class, r.extent_flags};
      const bool removes = (r.flags & Record::kRemoves) != 0;
      if (r.flags & Record::kAnyBase) give_up(r.chunk, freed);
      if (r.flags & Record::kCommitted) {
        install_version(entry, removes, freed);
      } else {
        pending_[r.chunk] = {entry, removes};
        if (index_.find(r.chunk) == nullptr) put_entry({.inode = r.chunk.inode, .index = r.chunk.index});
      }
      keep_tag({r.tag, r.chunk, r.version, r.length});
      break;
    }
    case RecordKind::commit: {
      const auto pending = pending_.find(r.chunk);
      if (pending == pending_.end() || pending->second.entry.version != r.version) break;
      const Pending version = pending->second;
      pending_.erase(pending);
      install_version(version.entry, version.removes, freed);
      break;
    }
    case RecordKind::drop: {
      // The write did not happen, so the client may retry it. The tag is changed even if no version is pending: a
      // snapshot may hold the tag from before the drop, but the chunk from after the drop.
      for (auto& [channel, tagged] : tags_)
        if (tagged.chunk == r.chunk && tagged.version == r.version) tagged.version = tagged.length = 0;
      const auto pending = pending_.find(r.chunk);
      if (pending != pending_.end() && pending->second.entry.version == r.version) give_up(r.chunk, freed);
      break;
    }
    case RecordKind::floor: floor_ = std::max(floor_, r.version); break;
    case RecordKind::tag: keep_tag({r.tag, r.chunk, r.version, r.length}); break;
    case RecordKind::forget:
      tags_.erase(tags_.lower_bound({r.tag.client, 0}), tags_.upper_bound({r.tag.client, ~std::uint32_t{0}}));
      break;
    case RecordKind::state: words_ = r.words; break;
    case RecordKind::damaged: damaged_ = r.version != 0; break;
  }
}

Status Core::settle(RecordKind kind, ChunkId chunk, Version version) {
  const std::unique_lock lock(mutex_);
  if (failed_) return Status::io_error;
  const auto pending = pending_.find(chunk);
  if (pending == pending_.end() || pending->second.entry.version != version || busy_.contains(chunk))
    return Status::diverged;
  Queued queued;
  queued.record.kind = kind;
  queued.record.chunk = chunk;
  queued.record.version = version;
  install(queued.record, queued.freed);
  queue_.push_back(std::move(queued));
  return Status::ok;
}

void Core::ride(const Record& record) {
  const std::unique_lock lock(mutex_);
  Queued queued;
  queued.record = record;
  install(record, queued.freed);
  queue_.push_back(std::move(queued));
}

// Makes the batch's bytes durable, and the names of their files. Throws Error.
void Core::sync_data(const std::vector<Queued>& batch) {
  std::vector<std::uint64_t> extents;
  for (const Queued& queued : batch)
    if (queued.apply && queued.record.extent.exists()) {
      Extent file = queued.record.extent;
      file.slot = 0;
      extents.push_back(file.packed());
    }
  std::sort(extents.begin(), extents.end());
  extents.erase(std::unique(extents.begin(), extents.end()), extents.end());
  for (const std::uint64_t packed : extents) disk_.sync(file_of(Extent::unpack(packed)));
  if (names_changed_.exchange(false)) disk_.sync_names();
}

// Makes the bytes durable, then writes the records. After a failure that does not set failed_ the log is unchanged.
// REQUIRES: sync_mutex_.
Status Core::write_batch(std::vector<Queued>& batch) {
  if (failed_) return Status::io_error;
  try {
    sync_data(batch);
  } catch (const Error&) {
    failed_ = true;
    return Status::io_error;
  }
  std::vector<std::byte> bytes;
  const LogPlace place{salt_, log_number_};
  for (std::size_t i = 0; i < batch.size(); ++i) {
    batch[i].record.sequence = next_sequence_ + i;
    batch[i].record.place = static_cast<std::uint32_t>(i);
    encode(batch[i].record, place, log_size_, bytes);
  }
  try {
    disk_.write(log_, log_size_, bytes.data(), bytes.size());
  } catch (const Error& error) {
    try {
      disk_.truncate(log_, log_size_);
      disk_.sync(log_);
    } catch (const Error&) {
      failed_ = true;
    }
    return status_of_log(error);
  }
  try {
    disk_.sync(log_);
  } catch (const Error&) {
    failed_ = true;
    return Status::io_error;
  }
  copy_log(log_size_, bytes);
  next_sequence_ += batch.size();
  log_size_ += bytes.size();
  log_bytes_ += bytes.size();
  return Status::ok;
}

std::vector<Done> Core::sync() {
  const std::lock_guard one(sync_mutex_);
  std::vector<Queued> batch;
  {
    const std::unique_lock lock(mutex_);
    batch.swap(queue_);
  }
  std::vector<Done> done;
  synced_ = true;
  if (batch.empty()) return done;
  const Status status = write_batch(batch);
  synced_ = status == Status::ok;
  std::vector<Extent> freed;
  std::vector<Queued> rides;
  {
    const std::unique_lock lock(mutex_);
    for (Queued& queued : batch) {
      const Record& record = queued.record;
      if (status == Status::ok) {
        if (queued.apply) install(record, freed);
        freed.insert(freed.end(), queued.freed.begin(), queued.freed.end());
      } else if (!queued.apply) {
        rides.push_back(std::move(queued));  // the record is installed already, so the next batch writes it
        continue;
      } else if (!failed_ && queued.fresh) {
        freed.push_back(record.extent);
      }
      if (!queued.apply) continue;
      busy_.erase(record.chunk);
      done.push_back({queued.op, status, record.version, record.length, record.crc});
    }
    queue_.insert(queue_.begin(), std::make_move_iterator(rides.begin()), std::make_move_iterator(rides.end()));
  }
  free_unheld(freed);
  return done;
}

// Frees extents that no record names any more, now or after a crash. Punches the hole before the extent can be reused.
void Core::free_unheld(const std::vector<Extent>& extents) noexcept {
  for (const Extent& extent : extents) {
    {
      const std::lock_guard lock(held_mutex_);
      const auto held = held_.find(extent.packed());
      if (held != held_.end()) {
        held->second.free = true;
        continue;
      }
    }
    try {
      disk_.punch(file_of(extent), extent.position(), extent.stride());
    } catch (const Error&) {  // the extent keeps its space until it is reused
    }
    const std::unique_lock lock(mutex_);
    space_.free(extent);
  }
}

void Core::hold(Extent extent) {
  const std::lock_guard lock(held_mutex_);
  ++held_[extent.packed()].count;
}

void Core::release(std::span<const std::uint64_t> all) noexcept {
  std::array<std::uint64_t, 64> freed;
  while (!all.empty()) {
    std::size_t count = 0;
    const auto some = all.first(std::min(all.size(), freed.size()));
    all = all.subspan(some.size());
    {
      const std::lock_guard lock(held_mutex_);
      for (const std::uint64_t packed : some) {
        const auto held = held_.find(packed);
        if (--held->second.count > 0) continue;
        if (held->second.free) freed[count++] = packed;
        held_.erase(held);
      }
    }
    for (std::size_t n = 0; n < count; ++n) free_unheld({Extent::unpack(freed[n])});
  }
}

}  // namespace ff::fs3::store
