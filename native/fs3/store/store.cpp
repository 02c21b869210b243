#include "fs3/store/store.hpp"

#include <utility>

#include "base/error.hpp"
#include "fs3/store/core.hpp"

namespace ff::fs3::store {

Reading& Reading::operator=(Reading&& other) noexcept {
  if (this == &other) return *this;
  release();
  status = other.status;
  version = other.version;
  chunk_length = other.chunk_length;
  offset = other.offset;
  length = other.length;
  file = other.file;
  position = other.position;
  crcs = std::move(other.crcs);
  core_ = std::exchange(other.core_, nullptr);
  held_ = other.held_;
  return *this;
}

void Reading::release() noexcept {
  if (core_ != nullptr) std::exchange(core_, nullptr)->release({&held_, 1});
}

void Reading::release(std::span<Reading> readings) noexcept {
  std::array<std::uint64_t, 64> packed;
  for (std::size_t at = 0; at < readings.size();) {
    std::size_t count = 0;
    Core* core = nullptr;
    for (; at < readings.size() && count < packed.size(); ++at) {
      Reading& reading = readings[at];
      if (reading.core_ == nullptr) continue;
      if (core != nullptr && reading.core_ != core) break;
      core = std::exchange(reading.core_, nullptr);
      packed[count++] = reading.held_;
    }
    if (core != nullptr) core->release({packed.data(), count});
  }
}

Status Reading::copy(void* to) const {
  if (length == 0) return Status::ok;
  try {
    const std::size_t got = core_->disk_.read(file, position, to, length);
    std::fill_n(static_cast<char*>(to) + got, length - got, '\0');
  } catch (const Error&) {
    return Status::io_error;
  }
  return Status::ok;
}

Store::Store(std::unique_ptr<Core> core) : core_(std::move(core)) {}
Store::Store(Store&&) noexcept = default;
Store::~Store() = default;

Store Store::open(Disk& disk, Identity identity, Options options) {
  auto core = std::make_unique<Core>(disk, identity, options);
  core->recover();
  return Store(std::move(core));
}

Status Store::apply(std::uint64_t op, const Apply& apply) { return core_->apply(op, apply); }
Status Store::commit(ChunkId chunk, Version version) { return core_->settle(RecordKind::commit, chunk, version); }
Status Store::drop(ChunkId chunk, Version version) { return core_->settle(RecordKind::drop, chunk, version); }

void Store::raise_floor(Version floor) {
  Record record;
  record.kind = RecordKind::floor;
  record.version = floor;
  core_->ride(record);
}

void Store::keep_tag(const Tagged& tagged) {
  Record record;
  record.kind = RecordKind::tag;
  record.tag = tagged.tag;
  record.chunk = tagged.chunk;
  record.version = tagged.version;
  record.length = tagged.length;
  core_->ride(record);
}

void Store::forget_client(std::uint64_t client) {
  Record record;
  record.kind = RecordKind::forget;
  record.tag.client = client;
  core_->ride(record);
}

void Store::keep_state(const std::array<std::uint64_t, 4>& words) {
  Record record;
  record.kind = RecordKind::state;
  record.words = words;
  core_->ride(record);
}

void Store::clear_damage() {
  Record record;
  record.kind = RecordKind::damaged;
  record.version = 0;
  core_->ride(record);
}

std::vector<Done> Store::sync() { return core_->sync(); }
bool Store::snapshot_due() const { return core_->snapshot_due(); }
Status Store::snapshot() { return core_->snapshot(); }

Reading Store::read(ChunkId chunk, Version version, std::uint32_t offset, std::uint32_t length) {
  Reading reading;
  const ReadAsk ask{chunk, version, offset, length, &reading};
  core_->read({&ask, 1});
  return reading;
}
void Store::read(std::span<const ReadAsk> asks) { core_->read(asks); }
Entry Store::entry(ChunkId chunk) const { return core_->entry(chunk); }
std::vector<Entry> Store::page(std::optional<ChunkId> after, std::size_t limit) const {
  return core_->page(after, limit);
}
std::optional<Last> Store::last(ChunkId upto, std::uint32_t stride) const { return core_->last(upto, stride); }
Status Store::check(ChunkId chunk) { return core_->check(chunk); }

Version Store::floor() const {
  const std::shared_lock lock(core_->mutex_);
  return core_->floor_;
}

std::vector<Tagged> Store::tags() const {
  std::vector<Tagged> tags;
  const std::shared_lock lock(core_->mutex_);
  tags.reserve(core_->tags_.size());
  for (const auto& [key, tagged] : core_->tags_) tags.push_back(tagged);
  return tags;
}

std::optional<Tagged> Store::tag(std::uint64_t client, std::uint32_t channel) const {
  const std::shared_lock lock(core_->mutex_);
  const auto found = core_->tags_.find({client, channel});
  return found == core_->tags_.end() ? std::nullopt : std::optional(found->second);
}

std::array<std::uint64_t, 4> Store::state() const {
  const std::shared_lock lock(core_->mutex_);
  return core_->words_;
}

bool Store::damaged() const {
  const std::shared_lock lock(core_->mutex_);
  return core_->damaged_;
}

bool Store::failed() const { return core_->failed_; }
bool Store::synced() const { return core_->synced_; }
Statistics Store::statistics() const { return core_->statistics(); }

}  // namespace ff::fs3::store
