// A Store beside a model of its expected contents, for tests. A seed drives both through operations, failures, power
// cuts and lies. One thread.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/crc/crc32c.hpp"
#include "base/error.hpp"
#include "base/testing/check.hpp"
#include "fs3/store/disk/sim_disk.hpp"
#include "fs3/store/store.hpp"

namespace ff::fs3::store {

using Bytes = std::vector<std::byte>;

struct ModelVersion {
  Version version = 0;
  Bytes bytes;
  bool remove = false;
  bool operator==(const ModelVersion&) const = default;
};

struct ModelChunk {
  ModelVersion committed, pending;
  bool operator==(const ModelChunk&) const = default;
};

class Model {
 public:
  // fails: calls of the disk fail. lies: synced writes are lost or misplaced. rots: each reopening finds a changed byte
  // in the identity, a log or the index.
  enum class Disk { fails, lies, rots };
  explicit Model(std::uint64_t seed, Disk disk = Disk::fails)
      : random_(seed), disk_(seed), lies_(disk == Disk::lies), rots_(disk == Disk::rots) {
    open();
  }

  void run(int steps) {
    for (int i = 0; i < steps; ++i) step();
    if (store_->failed()) reopen();
    check_all();
    drain();
  }

 private:
  // Possible states of a chunk after a crash: `states` in the order of their records, the first one durable; the store
  // shows `states[shown]`.
  struct Chunk {
    std::vector<ModelChunk> states{1};
    std::size_t shown = 0;
    bool busy = false;
    ModelChunk& now() { return states[shown]; }
  };
  struct Held {
    Reading reading;
    Bytes bytes;
  };

  std::uint64_t below(std::uint64_t n) { return random_() % n; }
  bool chance(std::uint64_t one_in) { return below(one_in) == 0; }
  ChunkId id(std::uint64_t i) const { return {i / 2, static_cast<std::uint32_t>(i % 2)}; }
  Chunk& any_chunk(ChunkId& chunk) {
    if (!chance(3)) last_ = id(below(kChunks));  // often the chunk of the step before
    chunk = last_;
    return chunks_[chunk];
  }

  void open() {
    for (int attempt = 0;; ++attempt) {
      if (attempt == 0 && !rots_ && chance(8)) disk_.fail(below(20), Fault::io);
      try {
        store_.emplace(Store::open(disk_, {3, 4}, {.log_bytes = 1024 + below(4096), .reserve_bytes = 0}));
        disk_.fail(0, Fault::none);
        return;
      } catch (const Error&) {
        CHECK(attempt == 0);
        if (chance(2)) disk_.crash();
        else disk_.power_cut(random_());
      }
    }
  }

  void reopen() {
    held_.clear();
    store_.reset();
    if (rots_ || chance(3)) disk_.crash();
    else disk_.power_cut(random_());
    if (rots_) damage();
    open();
    if (!lies_) CHECK(!store_->damaged());
    after_crash();
    if (rots_ && store_->snapshot_due()) snapshot(false);  // as Target::sync_always does
  }

  // Changes a byte of identity, a log or the index, in the file or (not for the index) in its copy.
  void damage() {
    std::vector<std::string> names = disk_.list();
    std::erase_if(names,
                  [](const std::string& name) { return name.starts_with("data-") || name.starts_with("copy-index-"); });
    const File file = disk_.open(names[below(names.size())], false);
    if (const std::uint64_t size = disk_.size(file); size != 0) {
      const std::uint64_t at = below(size);
      std::uint8_t byte = 0;
      CHECK(disk_.read(file, at, &byte, 1) == 1);
      byte = static_cast<std::uint8_t>(byte ^ 1 << below(8));
      disk_.write(file, at, &byte, 1);
    }
    disk_.close(file);
  }

  // Adopts the store's state, which must be one of the possible states of each chunk.
  void after_crash() {
    for (auto& [chunk, model] : chunks_) {
      const ModelChunk found = look(chunk);
      const auto state = std::find(model.states.begin(), model.states.end(), found);
      if (!lies_) CHECK(state != model.states.end());
      model = {{found}, 0, false};
    }
    for (auto& [channel, range] : tags_) {
      const auto tag = store_->tag(1, channel);
      const std::uint64_t seq = tag ? tag->tag.seq : 0;
      if (!lies_) CHECK(range.first <= seq && seq <= range.second);
      range = {seq, std::max(seq, range.second)};
    }
    if (!lies_) CHECK(durable_floor_ <= store_->floor() && store_->floor() <= floor_);
    durable_floor_ = store_->floor();
    waiting_.clear();
    next_seq_ += 10;
  }

  // Reads the store's state of a chunk. Checks that each block with a matching CRC has the bytes that were written to
  // that version.
  ModelChunk look(ChunkId chunk) {
    const Entry entry = store_->entry(chunk);
    ModelChunk found;
    found.committed = look(chunk, entry.committed);
    found.pending = look(chunk, entry.pending);
    return found;
  }
  ModelVersion look(ChunkId chunk, const VersionInfo& info) {
    ModelVersion found{info.version, {}, info.remove};
    if (info.version == 0 || info.remove) return found;
    const Bytes& right = ever_.at({chunk, info.version});
    const Reading reading = store_->read(chunk, info.version, 0, ~std::uint32_t{0});
    if (lies_ && reading.status == Status::corrupt) return {info.version, right, false};
    CHECK(reading.status == Status::ok && reading.chunk_length == info.length && info.length == right.size());
    found.bytes.resize(reading.length);
    CHECK(reading.copy(found.bytes.data()) == Status::ok && reading.length == right.size());
    CHECK(info.crc == crc32c(0, right.data(), right.size()));
    compare(reading, found.bytes, right);
    if (lies_) found.bytes = right;
    return found;
  }
  void compare(const Reading& reading, const Bytes& bytes, const Bytes& right) {
    for (std::size_t at = 0; at < bytes.size(); at += kBlock) {
      const std::size_t size = std::min(kBlock, bytes.size() - at);
      const bool verifies = crc32c(0, bytes.data() + at, size) == reading.crcs[at / kBlock];
      if (!lies_) CHECK(verifies);
      if (verifies)
        CHECK(std::equal(bytes.begin() + static_cast<std::ptrdiff_t>(at),
                         bytes.begin() + static_cast<std::ptrdiff_t>(at + size),
                         right.begin() + static_cast<std::ptrdiff_t>(reading.offset + at)));
    }
  }

  void step() {
    if (store_->failed()) return reopen();
    const bool failing = !lies_ && !rots_ && chance(12);
    failures_ = failures_ || failing;
    if (failing) disk_.fail(below(12), chance(2) ? Fault::io : Fault::no_space, 1 + below(3));
    if (lies_ && chance(20)) disk_.lie(random_());
    switch (below(16)) {
      case 0:
      case 1:
      case 2:
      case 3:
      case 4:
      case 5: apply(failing); break;
      case 6:
      case 7: settle(failing); break;
      case 8:
      case 9:
      case 10: sync(failing); break;
      case 11: read(failing); break;
      case 12: hold(failing); break;
      case 13:
        if (store_->snapshot_due() || chance(4)) snapshot(failing);
        break;
      case 14: ride(); break;
      case 15:
        if (chance(2)) return reopen();
        break;
    }
    disk_.fail(0, Fault::none);
    if (failing && chance(3)) reopen();
  }

  void apply(bool failing) {
    ChunkId chunk;
    Chunk& model = any_chunk(chunk);
    ModelChunk next = model.now();
    ModelVersion& base = model.now().committed;
    Apply a{.chunk = chunk, .base = base.version, .version = ++version_, .chain_version = 7};
    a.kind = static_cast<Kind>(below(5));
    if (chance(15)) a.base = kAnyBase;
    a.committed = chance(2);
    const std::uint64_t scale = chance(6) ? 70000 : chance(2) ? 20000 : 3000;
    Bytes bytes(1 + below(scale));
    for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(version_ * 31 + i / 200);
    Bytes after = base.bytes;
    if (a.kind == Kind::write) {
      a.offset = static_cast<std::uint32_t>(chance(2) ? after.size() : below(after.size() + 5000));
      if (after.size() < a.offset + bytes.size()) after.resize(a.offset + bytes.size());
      std::copy(bytes.begin(), bytes.end(), after.begin() + a.offset);
    } else if (a.kind == Kind::replace) {
      if (chance(8)) bytes.clear();
      after = bytes;
    } else if (a.kind == Kind::truncate) {
      a.length = static_cast<std::uint32_t>(below(after.size() + 1));
      if (chance(2)) a.length = a.length / 4096 * 4096;
      after.resize(a.length);
    } else if (a.kind == Kind::extend) {
      a.length = static_cast<std::uint32_t>(after.size() + below(9000));
      after.resize(a.length);
    } else {
      after.clear();
    }
    if (a.kind == Kind::write || a.kind == Kind::replace) a.bytes = bytes;
    std::vector<std::uint32_t> crcs;
    for (std::size_t at = a.offset; at < a.offset + a.bytes.size();) {
      const std::size_t end = std::min((at / kBlock + 1) * kBlock, a.offset + a.bytes.size());
      crcs.push_back(crc32c(0, bytes.data() + (at - a.offset), end - at));
      at = end;
    }
    if (chance(2)) a.crcs = crcs;
    const auto channel = static_cast<std::uint32_t>(below(3));
    if (!chance(3)) a.tag = {1, channel, ++next_seq_};
    const bool any = a.kind == Kind::replace || a.base == kAnyBase;
    const Status status = store_->apply(version_, a);
    if (model.busy || (!any && model.now().pending.version != 0)) {
      CHECK(status == Status::diverged);
      return;
    }
    if (status != Status::ok) {
      CHECK(failing || (lies_ && status == Status::corrupt));
      return;
    }
    const ModelVersion made{version_, after, a.kind == Kind::remove};
    if (any) next.pending = {};
    if (!a.committed) next.pending = made;
    else next.committed = made.remove ? ModelVersion{} : made;
    ever_[{chunk, version_}] = after;
    if (a.tag.client != 0) tags_[channel].second = a.tag.seq;
    if (made.remove) floor_ = version_;  // an upper bound: the model does not track whether the removal counts already
    model.states.push_back(next);
    model.busy = true;
    waiting_[version_] = {chunk, a.tag, a.committed && made.remove};
  }

  void settle(bool failing) {
    ChunkId chunk;
    Chunk& model = any_chunk(chunk);
    ModelChunk next = model.now();
    const Version version = next.pending.version;
    const bool commits = !chance(3);
    const Status status = commits ? store_->commit(chunk, version) : store_->drop(chunk, version);
    if (version == 0 || model.busy) {
      CHECK(status == Status::diverged);
      return;
    }
    CHECK(status == Status::ok);
    if (commits) next.committed = next.pending.remove ? ModelVersion{} : next.pending;
    next.pending = {};
    model.states.push_back(next);
    model.shown = model.states.size() - 1;
    if (!failing) CHECK(look(chunk) == model.now());
  }

  void ride() {
    for (std::uint64_t left = 1 + below(8); left > 0; --left) {
      if (chance(2)) {
        store_->raise_floor(floor_ = std::max(floor_, ++version_));
        CHECK(store_->floor() == floor_);
      } else {
        store_->keep_tag({{1, 1, ++next_seq_}, id(0), 1, 0});
        tags_[1].second = next_seq_;
      }
    }
  }

  void sync(bool failing) {
    const std::vector<Done> done = store_->sync();
    bool whole = true;
    for (const Done& d : done) {
      const auto [chunk, tag, removed] = waiting_.at(d.op);
      waiting_.erase(d.op);
      Chunk& model = chunks_[chunk];
      model.busy = false;
      if (d.status == Status::ok) {
        model.shown = model.states.size() - 1;
        if (tag.client != 0) tags_[tag.channel].first = std::max(tags_[tag.channel].first, tag.seq);
        if (removed) durable_floor_ = std::max(durable_floor_, d.version);
        continue;
      }
      CHECK(failing);
      whole = false;
      if (!store_->failed()) model.states.pop_back();  // certainly undone
    }
    if (store_->failed()) {
      waiting_.clear();
      return;
    }
    if (!whole || failing) return;
    CHECK(waiting_.empty());
    durable_floor_ = std::max(durable_floor_, store_->floor());
    for (auto& [channel, range] : tags_) range.first = store_->tag(1, channel) ? store_->tag(1, channel)->tag.seq : 0;
    for (auto& [chunk, model] : chunks_) model = {{model.now()}, 0, false};
  }

  void snapshot(bool failing) {
    const Status status = store_->snapshot();
    CHECK(failing || status == Status::ok);
  }

  void read(bool failing) {
    ChunkId chunk;
    Chunk& model = any_chunk(chunk);
    if (failing) return;
    CHECK(look(chunk) == model.now());
    const Bytes& right = model.now().committed.bytes;
    const auto offset = static_cast<std::uint32_t>(below(80000)), length = static_cast<std::uint32_t>(below(9000));
    const Reading reading = store_->read(chunk, 0, offset, length);
    if (model.now().committed.version == 0) {
      CHECK(reading.status == Status::not_found);
    } else if (reading.status == Status::ok) {
      Bytes bytes(reading.length);
      CHECK(reading.copy(bytes.data()) == Status::ok);
      CHECK((length == 0 || offset >= right.size()) == (reading.length == 0));
      CHECK(reading.length == 0 ||
            (reading.offset <= offset &&
             reading.offset + reading.length >= std::min<std::size_t>(offset + length, right.size())));
      compare(reading, bytes, right);
    } else {
      CHECK(lies_ && reading.status == Status::corrupt);
    }
    if (!lies_) CHECK(store_->check(chunk) == (reading.status == Status::not_found ? Status::not_found : Status::ok));
  }

  // Holds Readings of both versions over later steps, and checks that their bytes stay.
  void hold(bool failing) {
    if (failing) return;
    for (Held& held : held_) {
      Bytes bytes(held.reading.length);
      CHECK(held.reading.copy(bytes.data()) == Status::ok);
      if (!lies_) CHECK(bytes == held.bytes);
    }
    if (held_.size() > 3) held_.erase(held_.begin() + static_cast<std::ptrdiff_t>(below(held_.size())));
    ChunkId chunk;
    const ModelChunk now = any_chunk(chunk).now();
    Held held{store_->read(chunk, chance(2) ? now.pending.version : 0, 0, ~std::uint32_t{0}), {}};
    if (held.reading.status != Status::ok) return;
    held.bytes.resize(held.reading.length);
    CHECK(held.reading.copy(held.bytes.data()) == Status::ok);
    held_.push_back(std::move(held));
  }

  void check_all() {
    std::vector<Entry> entries;
    std::optional<ChunkId> after;
    for (auto page = store_->page(after, 2); !page.empty(); page = store_->page(after, 2)) {
      entries.insert(entries.end(), page.begin(), page.end());
      after = entries.back().chunk;
    }
    std::size_t present = 0;
    for (auto& [chunk, model] : chunks_) {
      CHECK(look(chunk) == model.now());
      present += model.now().committed.version != 0 || model.now().pending.version != 0;
    }
    CHECK(entries.size() == present && store_->statistics().chunks == present);
  }

  // Checks that no space is in use after all chunks are removed and synced, by the store's count and by the disk's. If
  // punching a hole failed, the disk's count is checked after the store was opened again.
  void drain() {
    static_cast<void>(store_->sync());
    for (std::uint64_t i = 0; i < kChunks; ++i)
      CHECK(
          store_->apply(
              i, {.chunk = id(i), .base = kAnyBase, .version = ++version_, .kind = Kind::remove, .committed = true}) ==
          Status::ok);
    for (const Done& done : store_->sync()) CHECK(done.status == Status::ok);
    held_.clear();
    const Statistics statistics = store_->statistics();
    CHECK(statistics.chunks == 0 && statistics.extents == 0 && statistics.bytes == 0 && statistics.held == 0);
    if (failures_) {
      store_.reset();
      disk_.crash();
      open();
    }
    if (!lies_) CHECK(disk_.used_bytes("data-") == 0);
  }

  static constexpr std::uint64_t kChunks = 4;
  struct Waiting {
    ChunkId chunk;
    Tag tag;
    bool removed;
  };
  std::mt19937_64 random_;
  SimDisk disk_;
  const bool lies_, rots_;
  ChunkId last_;
  bool failures_ = false;  // a call was made to fail in some step
  std::optional<Store> store_;
  std::vector<Held> held_;
  std::map<ChunkId, Chunk> chunks_;
  std::map<std::pair<ChunkId, Version>, Bytes> ever_;
  std::map<std::uint32_t, std::pair<std::uint64_t, std::uint64_t>> tags_;  // by channel: durable seq, newest seq
  std::map<std::uint64_t, Waiting> waiting_;                               // Applies in flight, by op
  Version version_ = 0, floor_ = 0, durable_floor_ = 0;
  std::uint64_t next_seq_ = 0;
};

}  // namespace ff::fs3::store
