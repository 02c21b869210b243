// A real chunk store through the replica's Lookup.
#include "fs3/replica/store_lookup.hpp"

#include <cstddef>
#include <vector>

#include "base/testing/check.hpp"
#include "base/testing/one_thread.hpp"
#include "fs3/store/disk/sim_disk.hpp"

using namespace ff::fs3;
using namespace ff::fs3::replica;

namespace {

// The record of a REMOVE is damaged, and its chunk's extent holds another chunk's bytes: pages give the chunk a CRC
// that no target has, so that a sync sends the chunk.
void lost_chunks_are_equal_to_none() {
  store::SimDisk disk(1);
  std::uint32_t crc = 0;
  {
    store::Store chunks = store::Store::open(disk, {1, 2}, {.reserve_bytes = 0});
    const auto write = [&](ChunkId chunk, Version base, Kind kind, const std::vector<std::byte>& bytes) {
      CHECK(chunks.apply(
                1,
                {.chunk = chunk, .base = base, .version = base + 1, .kind = kind, .committed = true, .bytes = bytes}) ==
            Status::ok);
      CHECK(chunks.sync().at(0).status == Status::ok);
    };
    write({1, 0}, 0, Kind::write, std::vector<std::byte>(100));
    crc = chunks.entry({1, 0}).committed.crc;
    write({1, 0}, 1, Kind::remove, {});
    write({2, 0}, 0, Kind::write, std::vector<std::byte>(200, std::byte{7}));
  }
  constexpr std::uint64_t kRemove = 64 + 128;  // behind the BEGIN and the first record
  for (const char* name : {"log-000000000000", "copy-log-000000000000"}) {
    const store::File file = disk.open(name, false);
    disk.write(file, kRemove + 30, "x", 1);
    disk.close(file);
  }
  const store::Store chunks = store::Store::open(disk, {1, 2}, {.reserve_bytes = 0});
  const StoreLookup lookup(chunks);
  std::vector<Entry> page;
  lookup.page({}, 10, page);
  CHECK(!lookup.complete() && page.size() == 2 && page[0].crc != crc && page[1].crc == lookup.entry({2, 0}).crc);
  CHECK(lookup.entry({1, 0}).crc == crc);  // the CRC of the contents that a repair fetches
}

}  // namespace

int main() {
  lost_chunks_are_equal_to_none();
  store::SimDisk disk(1);
  store::Store chunks = store::Store::open(disk, {1, 2}, {.reserve_bytes = 0});
  const StoreLookup lookup(chunks);
  CHECK(lookup.complete() && lookup.floor() == 0 && lookup.pendings().empty());
  const std::vector<std::byte> bytes(100);
  const auto put = [&](ChunkId chunk, Version base, bool committed, Kind kind, Tag tag) {
    const store::Apply apply{.chunk = chunk,
                             .base = base,
                             .version = base + 2,
                             .kind = kind,
                             .committed = committed,
                             .bytes = kind == Kind::write ? std::span(bytes) : std::span<const std::byte>(),
                             .tag = tag};
    CHECK(chunks.apply(1, apply) == Status::ok && chunks.sync().at(0).status == Status::ok);
  };
  put({1, 0}, 0, true, Kind::write, {5, 0, 1});
  put({1, 1}, 0, true, Kind::write, {5, 0, 2});
  put({1, 1}, 2, false, Kind::remove, {5, 0, 3});
  put({2, 0}, 0, false, Kind::write, {6, 0, 1});

  std::vector<Entry> page;
  lookup.page({}, 10, page);
  CHECK(page.size() == 3 && page[0].chunk == (ChunkId{1, 0}) && page[0].committed == 2 && page[0].length == 100);
  CHECK(page[1].committed == 2 && page[1].pending == 4 && page[1].removes);
  CHECK(page[2].committed == 0 && page[2].pending == 2 && !page[2].removes);
  page.clear();
  lookup.page({1, 0}, 1, page);
  CHECK(page.size() == 1 && page[0].chunk == (ChunkId{1, 1}));
  CHECK(lookup.entry({7, 0}).committed == 0 && lookup.entry({7, 0}).chunk == (ChunkId{7, 0}));
  CHECK(lookup.tag(5, 0).version == 4 && lookup.tag(5, 0).tag.seq == 3 && lookup.tag(9, 9).tag.client == 0);
  const std::vector<Pending> pendings = lookup.pendings();
  CHECK(pendings.size() == 2 && pendings[0].removes && pendings[0].tag == (Tag{5, 0, 3}));
  CHECK(pendings[1].length == 100 && pendings[1].tag == (Tag{6, 0, 1}));
  chunks.commit({1, 1}, 4);
  CHECK(lookup.floor() == 4);
  chunks.keep_state({1, 0, 0, 0});
  CHECK(!lookup.complete());
}
