// Store::apply: writes the bytes of a version and their CRCs into an extent.
#include <algorithm>

#include "base/error.hpp"
#include "fs3/store/core.hpp"
#include "fs3/store/fill.hpp"

namespace ff::fs3::store {
namespace {

Status status_of(const Error& error) {
  switch (error.code()) {
    case Code::no_space: return Status::no_space;
    case Code::corrupted: return Status::corrupt;
    default: return Status::io_error;
  }
}

bool valid(const Apply& apply) {
  if (apply.version == 0 || apply.version == kAnyBase) return false;
  if (apply.kind == Kind::truncate || apply.kind == Kind::extend) return apply.length <= kLargestChunk;
  if (apply.kind == Kind::remove) return true;
  if (apply.kind == Kind::replace ? apply.offset != 0 : apply.bytes.empty()) return false;
  if (apply.offset > kLargestChunk || apply.bytes.size() > kLargestChunk - apply.offset) return false;
  const std::uint64_t end = apply.offset + apply.bytes.size();
  return apply.crcs.empty() || apply.crcs.size() == blocks_of(end) - apply.offset / kBlock;
}

}  // namespace

// Plan of an Apply, made under the lock.
struct Core::Plan {
  IndexEntry base;         // length 0: none
  bool held = false;       // whether the base's extent is held
  IndexEntry entry;        // the new version
  std::uint8_t flags = 0;  // flags of the record
  Filling filling;
};

// REQUIRES: valid(apply). Makes the plan, and marks the chunk busy.
Status Core::plan(const Apply& apply, Plan& plan) {
  if (failed_) return Status::io_error;
  if (busy_.contains(apply.chunk)) return Status::diverged;
  const bool any = apply.kind == Kind::replace || apply.base == kAnyBase;
  const IndexEntry* const old = index_.find(apply.chunk);
  const bool pending = pending_.contains(apply.chunk);
  if (!any && (pending || apply.base != (old == nullptr ? 0 : old->version))) return Status::diverged;
  if (old != nullptr) plan.base = *old;
  const IndexEntry& base = plan.base;
  const bool sealed = pending || (base.flags & IndexEntry::kSealed) != 0;

  plan.flags = static_cast<std::uint8_t>((apply.committed ? Record::kCommitted : 0) | (any ? Record::kAnyBase : 0) |
                                         (apply.kind == Kind::remove ? Record::kRemoves : 0));
  IndexEntry& entry = plan.entry;
  entry = {.inode = apply.chunk.inode,
           .index = apply.chunk.index,
           .chain_version = apply.chain_version,
           .version = apply.version};
  const auto bytes = static_cast<std::uint32_t>(apply.bytes.size());
  Range written;
  switch (apply.kind) {
    case Kind::remove: break;
    case Kind::replace:
      entry.length = bytes;
      written = {0, bytes};
      break;
    case Kind::write:
      entry.length = std::max(base.length, apply.offset + bytes);
      written = {apply.offset, apply.offset + bytes};
      break;
    case Kind::truncate: entry.length = std::min(base.length, apply.length); break;
    case Kind::extend: entry.length = std::max(base.length, apply.length); break;
  }
  if (written.size() == 0) written = {entry.length, entry.length};

  // Chooses the extent. A version without new bytes shares the base's extent if the version is not much shorter than
  // the base. A version that appends shares that extent if no other version has bytes after the base's end.
  const bool covers = written.begin == 0 && written.end == entry.length;  // needs no bytes of the base
  if (!covers && (base.flags & IndexEntry::kLost)) return Status::corrupt;
  const bool appends = written.begin >= base.length && entry.length > base.length;
  bool same = false;
  if (!covers && base.extent().exists())
    same = appends ? !sealed && entry.length <= base.extent().capacity()
                   : written.size() == 0 && base.size_class <= class_for(entry.length) + 1;
  if (same) {
    entry.set_extent(base.extent());
    entry.salt = base.salt;
    entry.flags = static_cast<std::uint8_t>(base.flags | (entry.length < base.length ? IndexEntry::kSealed : 0));
  }
  plan.filling = {.written = written, .bytes = apply.bytes, .crcs = apply.crcs, .fresh = entry.length > 0 && !same};
  busy_.insert(apply.chunk);
  if (base.extent().exists()) {
    hold(base.extent());
    plan.held = true;
  }
  return Status::ok;
}

Extent Core::take(std::uint8_t size_class) {
  const std::uint64_t needed = options_.reserve_bytes + class_bytes(size_class);
  if (disk_.free_bytes() < needed)
    throw Error(Code::no_space, "fewer than " + std::to_string(needed) + " bytes are free");
  const std::unique_lock lock(mutex_);
  return space_.take(size_class);
}

std::uint32_t Core::new_salt() {
  std::uint64_t z = salt_ ^ (++salts_ * 0x9e3779b97f4a7c15ull);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  return static_cast<std::uint32_t>((z ^ (z >> 27)) >> 16);
}

void Core::queue(std::uint64_t op, const Apply& apply, const Plan& plan) {
  const IndexEntry& entry = plan.entry;
  Queued queued;
  Record& record = queued.record;
  record.kind = RecordKind::apply;
  record.flags = plan.flags;
  record.chunk = apply.chunk;
  record.version = entry.version;
  record.chain_version = entry.chain_version;
  record.length = entry.length;
  record.crc = entry.crc;
  record.last_crc = entry.last_crc;
  record.extent = entry.extent();
  record.extent_flags = entry.flags;
  record.salt = entry.salt;
  record.tag = apply.tag;
  queued.op = op;
  queued.apply = true;
  queued.fresh = plan.filling.fresh;
  const std::unique_lock lock(mutex_);
  queue_.push_back(std::move(queued));
}

Status Core::apply(std::uint64_t op, const Apply& apply) {
  if (!valid(apply)) return Status::invalid;
  Plan plan;
  {
    const std::unique_lock lock(mutex_);
    const Status refused = this->plan(apply, plan);
    if (refused != Status::ok) return refused;
  }
  Filling& filling = plan.filling;
  Status status = Status::ok;
  try {
    if (filling.fresh) {
      plan.entry.salt = new_salt();
      plan.entry.set_extent(take(class_for(plan.entry.length)));
    }
    if (plan.entry.length > 0) status = Fill(*this, filling, plan.base, plan.entry).run();
  } catch (const Error& error) {
    status = status_of(error);
  }
  if (status == Status::ok) queue(op, apply, plan);
  if (plan.held) {
    const std::uint64_t packed = plan.base.extent().packed();
    release({&packed, 1});
  }
  if (status == Status::ok) return status;
  if (filling.fresh && plan.entry.extent().exists()) free_unheld({plan.entry.extent()});
  const std::unique_lock lock(mutex_);
  busy_.erase(apply.chunk);
  return status;
}

}  // namespace ff::fs3::store
