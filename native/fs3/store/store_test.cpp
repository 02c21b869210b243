// Cases outside the model: damage made by hand, holes in large chunks, full disks, real directories, many threads.
#include "fs3/store/store.hpp"

#include <stdlib.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <string>
#include <thread>

#include "base/crc/crc32c.hpp"
#include "base/error.hpp"
#include "base/testing/check.hpp"
#include "fs3/store/disk/directory_disk.hpp"
#include "fs3/store/disk/sim_disk.hpp"
#include "fs3/store/layout/space.hpp"

using namespace ff::fs3;
using namespace ff::fs3::store;
using ff::crc32c;

namespace {

constexpr Identity kIdentity{1, 2};
constexpr Options kOptions{.log_bytes = 1 << 20, .reserve_bytes = 0};
using Bytes = std::vector<std::byte>;

Bytes pattern(std::size_t size, int seed) {
  Bytes bytes(size);
  for (std::size_t i = 0; i < size; ++i)
    bytes[i] = static_cast<std::byte>(i * 7 + static_cast<std::size_t>(seed) + i / 4096);
  return bytes;
}

Status put(Store& store, ChunkId chunk, Version base, const Bytes& bytes, std::uint32_t offset = 0,
           Kind kind = Kind::write) {
  Apply change{.chunk = chunk, .base = base, .kind = kind, .committed = true, .offset = offset, .bytes = bytes};
  change.version = base == kAnyBase ? 1 : base + 1;
  const Status status = store.apply(1, change);
  if (status != Status::ok) return status;
  return store.sync().at(0).status;
}

Status resize(Store& store, ChunkId chunk, Version base, Kind kind, std::uint32_t length) {
  Apply change{.chunk = chunk, .base = base, .version = base + 1, .kind = kind, .committed = true, .length = length};
  CHECK(store.apply(1, change) == Status::ok);
  return store.sync().at(0).status;
}

Status remove(Store& store, ChunkId chunk) {
  CHECK(store.apply(1, {.chunk = chunk, .base = kAnyBase, .version = 9, .kind = Kind::remove, .committed = true}) ==
        Status::ok);
  return store.sync().at(0).status;
}

Bytes whole(Store& store, ChunkId chunk) {
  const Reading reading = store.read(chunk, 0, 0, ~std::uint32_t{0});
  CHECK(reading.status == Status::ok);
  Bytes bytes(reading.length);
  CHECK(reading.copy(bytes.data()) == Status::ok);
  for (std::size_t at = 0; at < bytes.size(); at += kBlock)
    CHECK(crc32c(0, bytes.data() + at, std::min(kBlock, bytes.size() - at)) == reading.crcs[at / kBlock]);
  return bytes;
}

void overwrite(Disk& disk, const std::string& name, std::uint64_t offset, const void* from, std::size_t size) {
  const File file = disk.open(name, false);
  CHECK(file != kNoFile);
  disk.write(file, offset, from, size);
  disk.sync(file);
  disk.close(file);
}

void damaged_bytes_are_corrupt() {
  SimDisk disk(1);
  Store store = Store::open(disk, kIdentity, kOptions);
  const ChunkId chunk{1, 0};
  CHECK(put(store, chunk, 0, pattern(10000, 1)) == Status::ok && store.check(chunk) == Status::ok);
  overwrite(disk, "data-1-0", 5000, "x", 1);
  CHECK(store.check(chunk) == Status::corrupt);
  CHECK(put(store, chunk, 1, pattern(100, 2)) == Status::corrupt);  // would copy the damaged block
  CHECK(store.apply(1, {.chunk = chunk, .base = 1, .version = 2, .kind = Kind::truncate, .length = 5000}) ==
        Status::corrupt);
  CHECK(put(store, chunk, 1, pattern(20000, 2)) == Status::ok && store.check(chunk) == Status::ok);
  const std::uint32_t zero = 0;
  overwrite(disk, "data-2-0", class_bytes(2) + 4, &zero, 4);  // the extent's table of CRCs
  CHECK(store.check(chunk) == Status::corrupt && put(store, chunk, 2, pattern(100, 3)) == Status::corrupt);
  CHECK(put(store, chunk, kAnyBase, pattern(30, 3), 0, Kind::replace) == Status::ok);
  CHECK(whole(store, chunk) == pattern(30, 3));
}

// The disk loses a write of an extent's bytes and table of CRCs. The old bytes and table were valid for another chunk.
void lost_write_of_all_is_corrupt() {
  SimDisk disk(1);
  Store store = Store::open(disk, kIdentity, kOptions);
  CHECK(put(store, {1, 0}, 0, pattern(10000, 1)) == Status::ok);
  const std::size_t stride = class_bytes(1) + table_bytes(1);
  Bytes old(stride);
  const File file = disk.open("data-1-0", false);
  old.resize(disk.read(file, 0, old.data(), stride));
  disk.close(file);
  CHECK(remove(store, {1, 0}) == Status::ok && put(store, {2, 0}, 0, pattern(10000, 2)) == Status::ok);
  overwrite(disk, "data-1-0", 0, old.data(), old.size());
  CHECK(store.check({2, 0}) == Status::corrupt);
  const Reading reading = store.read({2, 0}, 0, 0, 4096);
  CHECK(reading.status == Status::ok && reading.crcs.size() == 1 && reading.crcs[0] != crc32c(0, old.data(), kBlock));
}

// Cached CRCs are those of the version that is read now; `check` uses the CRCs on the disk.
void small_reads_get_the_crcs_of_their_version() {
  SimDisk disk(1);
  Store store = Store::open(disk, kIdentity, kOptions);
  const ChunkId chunk{1, 0};
  const auto verify = [&](const Bytes& wanted) {
    for (int again = 0; again < 2; ++again) {
      std::vector<Reading> readings(wanted.size() / kBlock);
      std::vector<ReadAsk> asks;
      for (std::uint32_t n = 0; n < readings.size(); ++n) asks.push_back({chunk, 0, n * 4096 + 5, 10, &readings[n]});
      store.read(asks);
      for (std::size_t n = 0; n < readings.size(); ++n) {
        CHECK(readings[n].status == Status::ok && readings[n].crcs.size() == 1 && readings[n].offset == n * kBlock);
        CHECK(readings[n].crcs[0] == crc32c(0, wanted.data() + n * kBlock, kBlock));
      }
      CHECK(store.statistics().held == 1);
      Reading::release(readings);
      CHECK(store.statistics().held == 0);
    }
  };
  Bytes bytes = pattern(80 * kBlock, 1);
  CHECK(put(store, chunk, 0, bytes) == Status::ok);
  verify(bytes);
  const Bytes more = pattern(3 * kBlock, 2);  // in place: the same extent and salt
  CHECK(put(store, chunk, 1, more, 80 * 4096) == Status::ok);
  bytes.insert(bytes.end(), more.begin(), more.end());
  verify(bytes);
  std::copy(more.begin(), more.end(), bytes.begin());
  CHECK(put(store, chunk, 2, more) == Status::ok);
  verify(bytes);
  CHECK(store.check(chunk) == Status::ok);
  const Reading reading = store.read(chunk, 0, 0, 1);
  const std::uint32_t zero = 0;
  overwrite(disk, "data-4-0", reading.position + class_bytes(4), &zero, 4);
  CHECK(store.check(chunk) == Status::corrupt);
  CHECK(store.read(chunk, 0, 0, 1).crcs[0] != crc32c(0, bytes.data(), kBlock));
}

constexpr std::uint32_t kMended = 12;  // chunks of the history

Bytes mended_bytes(std::uint32_t index) { return pattern(1000 + 700 * index, static_cast<int>(index)); }

// Writes chunks twice, half of them with a snapshot in between. Removes a chunk; leaves one pending, with a tag.
void write_history(Store& store) {
  for (std::uint32_t index = 0; index < kMended; ++index)
    CHECK(put(store, {1, index}, 0, pattern(900, 99)) == Status::ok);
  for (std::uint32_t index = 0; index < 6; ++index)
    CHECK(put(store, {1, index}, kAnyBase, mended_bytes(index), 0, Kind::replace) == Status::ok);
  CHECK(put(store, {2, 0}, 0, pattern(70, 1)) == Status::ok && store.snapshot() == Status::ok);
  for (std::uint32_t index = 6; index < kMended; ++index)
    CHECK(put(store, {1, index}, kAnyBase, mended_bytes(index), 0, Kind::replace) == Status::ok);
  CHECK(store.apply(1, {.chunk = {3, 0}, .version = 5, .bytes = pattern(10, 3), .tag = {7, 0, 1}}) == Status::ok);
  static_cast<void>(store.sync());
  CHECK(remove(store, {2, 0}) == Status::ok);  // the last record
}

// Returns how many chunks have the bytes last written to them; the other chunks are older, or gone.
std::uint32_t chunks_as_written(Store& store) {
  std::uint32_t good = 0;
  for (std::uint32_t index = 0; index < kMended; ++index)
    good += store.check({1, index}) == Status::ok && whole(store, {1, index}) == mended_bytes(index) ? 1 : 0;
  return good;
}

bool all_as_written(Store& store) {
  return chunks_as_written(store) == kMended && store.entry({2, 0}).committed.version == 0 && store.floor() == 9 &&
         store.entry({3, 0}).pending.version == 5 && store.tag(7, 0).has_value();
}

void flip(Disk& disk, const std::string& name, std::uint64_t at) {
  const File file = disk.open(name, false);
  CHECK(file != kNoFile);
  unsigned char byte = 0;
  CHECK(disk.read(file, at, &byte, 1) == 1);
  byte ^= 0x10;
  disk.write(file, at, &byte, 1);
  disk.sync(file);
  disk.close(file);
}

std::uint64_t bytes_of(Disk& disk, const std::string& name) {
  const File file = disk.open(name, false);
  CHECK(file != kNoFile);
  const std::uint64_t size = disk.size(file);
  disk.close(file);
  return size;
}

// Flips any byte of identity, index or log, in the file or in its copy: nothing is lost or old, and the next snapshot
// writes all files again.
void one_damaged_place_is_mended() {
  const std::string kFiles[] = {"identity", "index-000000000001", "log-000000000001"};
  for (const std::string& file : kFiles) {
    for (const std::string& name : {file, "copy-" + file}) {
      std::uint64_t at = 0;
      for (std::uint64_t size = 1; at < size; at += 61) {
        SimDisk disk(1);
        std::optional<Store> store(Store::open(disk, kIdentity, kOptions));
        write_history(*store);
        store.reset();
        size = bytes_of(disk, name);
        flip(disk, name, at);
        store.emplace(Store::open(disk, kIdentity, kOptions));
        CHECK(!store->damaged() && all_as_written(*store));
        CHECK(!store->snapshot_due() || store->statistics().mended == 1);
        CHECK(store->snapshot() == Status::ok && !store->snapshot_due());
        store.reset();
        store.emplace(Store::open(disk, kIdentity, kOptions));
        CHECK(!store->damaged() && all_as_written(*store) && store->statistics().mended == 0);
      }
    }
  }
}

void one_lost_or_cut_file_is_mended() {
  for (const std::string name : {"identity", "index-000000000001", "log-000000000001"}) {
    for (const std::string& one : {name, "copy-" + name}) {
      for (const bool cut : {false, true}) {
        SimDisk disk(1);
        std::optional<Store> store(Store::open(disk, kIdentity, kOptions));
        write_history(*store);
        store.reset();
        if (cut) {
          const File file = disk.open(one, false);
          disk.truncate(file, disk.size(file) / 3);
          disk.close(file);
        } else {
          disk.remove(one);
        }
        store.emplace(Store::open(disk, kIdentity, kOptions));
        CHECK(!store->damaged() && all_as_written(*store));
      }
    }
  }
}

// Damages the log and its copy at the same offset: the store reports it, and the chunks of all other records stay.
void a_place_damaged_twice_is_reported() {
  for (std::uint64_t at = 64 + 61; at + 256 < 64 + 128 * 7; at += 61) {
    SimDisk disk(1);
    std::optional<Store> store(Store::open(disk, kIdentity, kOptions));
    write_history(*store);
    store.reset();
    for (const char* name : {"log-000000000001", "copy-log-000000000001"}) flip(disk, name, at);
    store.emplace(Store::open(disk, kIdentity, kOptions));
    CHECK(store->damaged() ? chunks_as_written(*store) >= kMended - 1 : all_as_written(*store));
  }
}

// The log lost a REMOVE, so two chunks claim one extent: the chunk whose bytes the extent holds gets it. The store
// reports the damage, across restarts and snapshots, until clear_damage().
void damaged_log_is_reported() {
  SimDisk disk(1);
  std::optional<Store> store(Store::open(disk, kIdentity, kOptions));
  const auto reopen = [&] {
    store.reset();
    disk.power_cut(1);
    store.emplace(Store::open(disk, kIdentity, kOptions));
  };
  CHECK(put(*store, {1, 0}, 0, pattern(10000, 1)) == Status::ok && remove(*store, {1, 0}) == Status::ok);
  CHECK(put(*store, {2, 0}, 0, pattern(9000, 2)) == Status::ok && put(*store, {3, 0}, 0, pattern(50, 3)) == Status::ok);
  const Bytes zeros(128);
  for (const char* name : {"log-000000000000", "copy-log-000000000000"})
    overwrite(disk, name, 64 + 128, zeros.data(), zeros.size());
  reopen();
  CHECK(store->damaged() && store->check({3, 0}) == Status::ok);
  CHECK(store->check({1, 0}) == Status::corrupt && store->entry({1, 0}).committed.lost);
  CHECK(whole(*store, {2, 0}) == pattern(9000, 2) && !store->entry({2, 0}).committed.lost);  // it has the extent
  CHECK(put(*store, {1, 0}, 1, pattern(100, 2)) == Status::corrupt);
  reopen();
  CHECK(store->damaged() && store->snapshot() == Status::ok);
  reopen();
  CHECK(store->damaged() && store->check({1, 0}) == Status::corrupt);
  CHECK(put(*store, {1, 0}, kAnyBase, pattern(70, 4), 0, Kind::replace) == Status::ok &&
        remove(*store, {2, 0}) == Status::ok);
  store->clear_damage();
  static_cast<void>(store->sync());
  reopen();
  CHECK(!store->damaged() && whole(*store, {1, 0}) == pattern(70, 4) && store->statistics().extents == 2);
}

void damaged_snapshot_and_identity_are_reported() {
  SimDisk disk(1);
  std::optional<Store> store(Store::open(disk, kIdentity, kOptions));
  for (std::uint64_t i = 0; i < 3000; ++i)
    CHECK(store->apply(i, {.chunk = {i, 0}, .version = 1, .kind = Kind::extend, .committed = true}) == Status::ok);
  CHECK(store->sync().size() == 3000 && store->snapshot() == Status::ok);
  store.reset();
  for (const char* name : {"index-000000000001", "copy-index-000000000001"})
    overwrite(disk, name, 3 * 65536 / 2, "x", 1);
  store.emplace(Store::open(disk, kIdentity, kOptions));
  CHECK(store->damaged() && store->statistics().chunks < 3000 && store->statistics().chunks > 1000);
  store.reset();
  try {
    Store::open(disk, {1, 3}, kOptions);
    CHECK(false);
  } catch (const ff::Error& error) {
    CHECK(error.code() == ff::Code::invalid);
  }
  for (const char* name : {"identity", "copy-identity"}) overwrite(disk, name, 3, "x", 1);
  store.emplace(Store::open(disk, kIdentity, kOptions));
  CHECK(store->damaged() && store->statistics().chunks == 0);
  store.reset();
  store.emplace(Store::open(disk, kIdentity, kOptions));
  CHECK(store->damaged());
}

void large_chunks() {
  SimDisk disk(1);
  Store store = Store::open(disk, kIdentity, kOptions);
  const ChunkId chunk{1, 0};
  Bytes right = pattern(3'000'001, 1);
  CHECK(put(store, chunk, 0, right) == Status::ok && whole(store, chunk) == right);
  CHECK(resize(store, chunk, 1, Kind::extend, 20'000'000) == Status::ok);  // to another size class, with a hole
  right.resize(20'000'000);
  CHECK(whole(store, chunk) == right && disk.used_bytes("data-") < 5'000'000);
  const Bytes more = pattern(2'500'000, 5);
  CHECK(put(store, chunk, 2, more, 30'000'000) == Status::ok);  // to another size class again
  right.resize(30'000'000);
  right.insert(right.end(), more.begin(), more.end());
  CHECK(whole(store, chunk) == right && store.check(chunk) == Status::ok);
  CHECK(put(store, chunk, 3, more, 1'048'000) == Status::ok);
  std::copy(more.begin(), more.end(), right.begin() + 1'048'000);
  CHECK(whole(store, chunk) == right);
  CHECK(put(store, chunk, 4, more, 40'000'000) == Status::ok);  // appended in place, behind a hole
  right.resize(40'000'000);
  right.insert(right.end(), more.begin(), more.end());
  CHECK(whole(store, chunk) == right && store.statistics().extents == 1);
  CHECK(put(store, chunk, 5, more, static_cast<std::uint32_t>(kLargestChunk - more.size() + 1)) == Status::invalid);
  CHECK(resize(store, chunk, 5, Kind::truncate, 1'100'000) == Status::ok);  // to a much smaller size class
  right.resize(1'100'000);
  CHECK(whole(store, chunk) == right && store.statistics().extent_bytes < 6'000'000);
}

// Bytes that a TRUNCATE cuts off remain for existing Readings, and for recovery until the TRUNCATE's commit is durable.
void truncate_seals() {
  SimDisk disk(1);
  std::optional<Store> store(Store::open(disk, kIdentity, kOptions));
  const ChunkId chunk{1, 0};
  const Bytes right = pattern(10000, 1);
  CHECK(put(*store, chunk, 0, right) == Status::ok);
  Reading reading = store->read(chunk, 0, 0, ~std::uint32_t{0});
  CHECK(store->apply(1, {.chunk = chunk, .base = 1, .version = 2, .kind = Kind::truncate, .length = 5000}) ==
        Status::ok);
  CHECK(store->sync().size() == 1 && store->commit(chunk, 2) == Status::ok);
  CHECK(store->apply(1, {.chunk = chunk, .base = 2, .version = 3, .offset = 5000, .bytes = pattern(3000, 9)}) ==
        Status::ok);
  Bytes bytes(right.size());
  CHECK(reading.copy(bytes.data()) == Status::ok && bytes == right);
  reading = {};
  store.reset();
  disk.crash();
  store.emplace(Store::open(disk, kIdentity, kOptions));
  CHECK(store->entry(chunk).committed.version == 1 && whole(*store, chunk) == right);
  CHECK(store->commit(chunk, 2) == Status::ok && store->sync().empty());
  CHECK(put(*store, chunk, 2, pattern(3000, 9), 5000) == Status::ok && whole(*store, chunk).size() == 8000);
}

void full_disk() {
  SimDisk disk(1, 4 << 20);
  Store store = Store::open(disk, kIdentity, {.log_bytes = 1 << 20, .reserve_bytes = 256 << 10});
  std::uint64_t chunks = 0;
  while (put(store, {chunks, 0}, 0, pattern(50000, 1)) == Status::ok) CHECK(++chunks < 100);
  CHECK(chunks > 10 && put(store, {0, 0}, 1, pattern(50000, 1)) == Status::no_space);
  for (std::uint64_t i = 0; i < chunks; ++i) CHECK(remove(store, {i, 0}) == Status::ok);
  CHECK(store.snapshot() == Status::ok && disk.used_bytes("data-") == 0 && !store.failed());
  CHECK(put(store, {0, 0}, 0, pattern(50000, 1)) == Status::ok);
}

// Large writes bypass the page cache if possible: same bytes, at any place, size and memory address.
void large_writes_of_a_directory() {
  char name[] = "/tmp/ff-store-test-XXXXXX";
  CHECK(::mkdtemp(name) != nullptr);
  {
    DirectoryDisk disk(name);
    const File file = disk.open("x", true);
    Bytes all(4 << 20);
    const Bytes from = pattern(1 << 20, 5);
    int seed = 1;
    for (const std::size_t memory : {0, 1, 512}) {
      for (const std::size_t offset : {0, 1, 4096, 1 << 20, 12288}) {
        for (const std::size_t size : {std::size_t{700001}, std::size_t{256 << 10}, from.size() - 512}) {
          Bytes bytes = pattern(size + memory, seed++);
          disk.write(file, offset, bytes.data() + memory, size);
          std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(memory), size,
                      all.begin() + static_cast<std::ptrdiff_t>(offset));
          const std::span<const std::byte> parts[] = {from, std::span(bytes).first(4096)};
          disk.write_parts(file, offset + size, parts);
          std::copy(from.begin(), from.end(), all.begin() + static_cast<std::ptrdiff_t>(offset + size));
          std::copy_n(bytes.begin(), 4096, all.begin() + static_cast<std::ptrdiff_t>(offset + size + from.size()));
          Bytes back(disk.size(file));
          CHECK(disk.read(file, 0, back.data(), back.size()) == back.size());
          CHECK(std::equal(back.begin(), back.end(), all.begin()));
        }
      }
    }
    disk.close(file);
    disk.remove("x");
    Store store = Store::open(disk, kIdentity, kOptions);
    for (const std::size_t size : {std::size_t{1} << 20, std::size_t{4} << 20, (std::size_t{1} << 20) - 4096}) {
      const Bytes bytes = pattern(size, 9);
      CHECK(put(store, {size, 0}, 0, bytes) == Status::ok && whole(store, {size, 0}) == bytes);
      CHECK(store.check({size, 0}) == Status::ok);
      CHECK(put(store, {size, 0}, 1, pattern(5000, 3), 8000) == Status::ok && store.check({size, 0}) == Status::ok);
    }
  }
  std::filesystem::remove_all(name);
}

// docs/internals/fs3-store.md: at most 128 bytes of index per chunk, in any order of chunks.
void the_index_is_small() {
  for (const int order : {0, 1, 2}) {
    SimDisk disk(1);
    Store store = Store::open(disk, kIdentity, kOptions);
    constexpr std::uint32_t kChunks = 20'000;
    for (std::uint32_t n = 0; n < kChunks; ++n) {
      const std::uint32_t index = order == 0 ? n : order == 1 ? kChunks - n : n * 7919u % 20'011u;
      CHECK(store.apply(n, {.chunk = {1, index}, .version = 1, .kind = Kind::replace, .committed = true}) ==
            Status::ok);
      if (n % 1000 == 999) store.sync();
    }
    const Statistics now = store.statistics();
    CHECK(now.chunks == kChunks && now.index_bytes >= kChunks * 48 && now.index_bytes <= kChunks * 128);
  }
}

// Compares last() with a std::set under random changes. Then checks rows with pending versions, and rows at the limits.
void last_chunks_and_their_rows() {
  SimDisk disk(1);
  Store store = Store::open(disk, kIdentity, kOptions);
  std::mt19937 engine(3);
  const auto random = [&] { return static_cast<std::uint32_t>(engine()); };
  std::set<std::uint32_t> there;
  for (int turn = 0; turn < 1500; ++turn) {
    const std::uint32_t index = random() % 300;
    const bool goes = random() % 3 == 0;
    const Kind kind = goes ? Kind::remove : Kind::replace;
    const Apply change{.chunk = {5, index}, .base = kAnyBase, .version = 1, .kind = kind, .committed = true};
    CHECK(store.apply(1, change) == Status::ok);
    CHECK(store.sync().at(0).status == Status::ok);
    if (goes) there.erase(index);
    else there.insert(index);
    const std::uint32_t upto = random() % 320, stride = random() % 4;
    const auto found = store.last({5, upto}, stride);
    auto at = there.upper_bound(upto);
    CHECK(found.has_value() == (at != there.begin()));
    if (!found) continue;
    std::uint32_t index_wanted = *--at, run = 1;
    CHECK(found->chunk == (ChunkId{5, index_wanted}));
    while (stride != 0 && at != there.begin() && *--at + stride == index_wanted) ++run, index_wanted = *at;
    CHECK(found->run == run);
  }
  const auto add = [&](std::uint64_t inode, std::uint32_t index, bool committed = true) {
    const Apply change{.chunk = {inode, index}, .version = 2, .kind = Kind::replace, .committed = committed};
    CHECK(store.apply(1, change) == Status::ok);
  };
  for (const std::uint32_t index : {kLastIndex, kLastIndex - 7, kLastIndex - 14, 3u}) add(6, index);
  for (const std::uint32_t index : {10u, 13u, 19u}) add(7, index);
  add(7, 16, false);
  add(7, 22, false);
  for (std::uint32_t n = 0; n < kMostRun + 10; ++n) add(8, 5 + 3 * n);
  store.sync();
  const auto row = [&](std::uint64_t inode, std::uint32_t upto, std::uint32_t stride) {
    const auto found = store.last({inode, upto}, stride);
    return found ? std::pair(found->chunk.index, found->run) : std::pair(0u, 0u);
  };
  using Row = std::pair<std::uint32_t, std::uint32_t>;
  CHECK(row(6, kLastIndex, 7) == Row(kLastIndex, 3) && row(6, kLastIndex, kLastIndex) == Row(kLastIndex, 1));
  CHECK(row(6, kLastIndex - 15, 7) == Row(3, 1) && row(6, 2, 7) == Row(0, 0) && row(9, kLastIndex, 1) == Row(0, 0));
  CHECK(row(7, kLastIndex, 3) == Row(19, 1) && row(7, 18, 3) == Row(13, 2) &&
        row(7, 13, 0) == Row(13, 1));  // chunks 16 and 22 are pending, so they do not count yet
  CHECK(store.commit({7, 16}, 2) == Status::ok && row(7, 21, 3) == Row(19, 4));
  constexpr std::uint32_t kTop = 5 + 3 * (kMostRun + 9);
  CHECK(row(8, kLastIndex, 3) == Row(kTop, kMostRun) && row(8, kTop - 3 * kMostRun, 3) == Row(5 + 27, 10));
}

void real_directory() {
  char name[] = "/tmp/ff-store-test-XXXXXX";
  CHECK(::mkdtemp(name) != nullptr);
  const std::filesystem::path path = name;
  {
    DirectoryDisk disk(path / "target");
    try {
      DirectoryDisk second(path / "target");
      CHECK(false);
    } catch (const ff::Error& error) {
      CHECK(error.code() == ff::Code::storage);
    }
    {
      Store store = Store::open(disk, kIdentity, kOptions);
      CHECK(put(store, {1, 0}, 0, pattern(200000, 1)) == Status::ok && store.snapshot() == Status::ok);
      CHECK(put(store, {1, 1}, 0, pattern(10, 2)) == Status::ok && remove(store, {1, 0}) == Status::ok);
      CHECK(put(store, {1, 2}, 0, pattern(300000, 3)) == Status::ok);
      CHECK(disk.descriptor(store.read({1, 2}, 0, 0, 1).file) >= 0 && store.last({1, kLastIndex})->chunk.index == 2);
    }
    Store store = Store::open(disk, kIdentity, kOptions);
    CHECK(!store.damaged() && whole(store, {1, 1}) == pattern(10, 2) && whole(store, {1, 2}) == pattern(300000, 3));
    CHECK(store.statistics().chunks == 2 && store.floor() == 9);
  }
  std::filesystem::remove_all(path);
}

// Appliers, readers, a syncer and snapshots at once: all reads verify, and all writes are there at the end.
void many_threads() {
  SimDisk disk(1);
  constexpr std::uint64_t kThreads = 3;
  constexpr Version kVersions = 60;
  {
    Store store = Store::open(disk, kIdentity, {.log_bytes = 8192, .reserve_bytes = 0});
    std::array<std::atomic<Version>, kThreads> durable{};
    std::atomic<bool> over = false;
    std::vector<std::thread> threads;
    for (std::uint64_t t = 0; t < kThreads; ++t)
      threads.emplace_back([&, t] {
        for (Version v = 0; v < kVersions; ++v) {
          const Bytes bytes = pattern(3000 + 500 * (v % 7), static_cast<int>(v));
          const auto offset = static_cast<std::uint32_t>(v % 3 == 0 ? 0 : 1000 * v);
          CHECK(store.apply(t, {.chunk = {t, 0},
                                .base = v,
                                .version = v + 1,
                                .committed = v % 2 == 0,
                                .offset = offset,
                                .bytes = bytes}) == Status::ok);
          while (durable[t] != v + 1) std::this_thread::yield();
          if (v % 2 != 0) CHECK(store.commit({t, 0}, v + 1) == Status::ok);
        }
      });
    for (std::uint64_t r = 0; r < 2; ++r)
      threads.emplace_back([&] {
        for (std::uint64_t i = 0; !over; ++i)
          if (store.entry({i % kThreads, 0}).committed.version != 0) {
            whole(store, {i % kThreads, 0});
            const Status status = store.check({i % kThreads, 0});
            CHECK(status == Status::ok);
          }
      });
    threads.emplace_back([&] {
      while (!over) {
        if (store.snapshot_due()) CHECK(store.snapshot() == Status::ok);
        std::this_thread::yield();
      }
    });
    std::uint64_t left = kThreads * kVersions;
    while (left > 0)
      for (const Done& done : store.sync()) {
        CHECK(done.status == Status::ok);
        durable[done.op] = done.version;
        --left;
      }
    for (std::uint64_t t = 0; t < kThreads; ++t) threads[t].join();
    over = true;
    for (std::size_t t = kThreads; t < threads.size(); ++t) threads[t].join();
    CHECK(store.sync().empty());  // only the last commits were queued
    CHECK(store.statistics().extents == kThreads && store.statistics().held == 0);
  }
  disk.power_cut(1);
  Store store = Store::open(disk, kIdentity, kOptions);
  for (std::uint64_t t = 0; t < kThreads; ++t) {
    CHECK(store.check({t, 0}) == Status::ok && !store.damaged());
    const Entry entry = store.entry({t, 0});
    CHECK(std::max(entry.committed.version, entry.pending.version) == kVersions);
  }
}

}  // namespace

int main() {
  many_threads();
  if (FF_THREAD_SANITIZER) return 0;  // all other tests have one thread
  damaged_bytes_are_corrupt();
  lost_write_of_all_is_corrupt();
  small_reads_get_the_crcs_of_their_version();
  one_damaged_place_is_mended();
  one_lost_or_cut_file_is_mended();
  a_place_damaged_twice_is_reported();
  damaged_log_is_reported();
  damaged_snapshot_and_identity_are_reported();
  large_chunks();
  truncate_seals();
  full_disk();
  large_writes_of_a_directory();
  the_index_is_small();
  last_chunks_and_their_rows();
  real_directory();
}
