// The index against a map, and its memory: at most 128 bytes per chunk at 10^6 chunks in any order.
#include "fs3/store/layout/index.hpp"

#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include "base/testing/check.hpp"
#include "base/testing/one_thread.hpp"

namespace {

using ff::fs3::ChunkId;
using ff::fs3::store::Index;
using ff::fs3::store::IndexEntry;

IndexEntry entry(std::uint64_t key) {
  return {.inode = key / 16, .index = static_cast<std::uint32_t>(key % 16), .version = key + 1};
}

void as_a_map(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Index index;
  std::map<ChunkId, ff::fs3::Version> model;
  for (int i = 0; i < 20000; ++i) {
    const IndexEntry e = entry(random() % 3000);
    if (random() % (i < 8000 ? 4 : 2) != 0) {
      index.put(e);
      model[e.chunk()] = e.version;
    } else {
      index.erase(e.chunk());
      model.erase(e.chunk());
    }
    const ChunkId probe = entry(random() % 3000).chunk();
    const auto found = model.find(probe);
    CHECK((index.find(probe) != nullptr) == (found != model.end()));
    const auto after = model.upper_bound(probe);
    CHECK((index.after(probe) == nullptr) == (after == model.end()));
    if (after != model.end()) CHECK(index.after(probe)->chunk() == after->first);
    auto before = after;
    for (auto left = random() % 200; left > 0 && before != model.begin(); --left) --before;
    auto at = after;
    index.down(probe, [&](const IndexEntry& its) {
      if (at == before) return false;
      CHECK(at != model.begin() && its.chunk() == (--at)->first && its.version == at->second);
      return true;
    });
    CHECK(at == before);
  }
  CHECK(index.size() == model.size());
}

void memory() {
  constexpr std::uint64_t kChunks = 1'000'000;
  std::mt19937_64 random(1);
  std::vector<std::uint64_t> keys(kChunks);
  for (std::uint64_t i = 0; i < kChunks; ++i) keys[i] = i;
  const auto fill = [&] {
    Index index;
    for (const std::uint64_t key : keys) index.put(entry(key));
    CHECK(index.size() == kChunks && index.memory() <= 128 * kChunks);
    return index;
  };
  fill();
  std::reverse(keys.begin(), keys.end());
  fill();
  std::shuffle(keys.begin(), keys.end(), random);
  Index index = fill();
  for (std::uint64_t i = 0; i < kChunks / 10 * 9; ++i) index.erase(entry(keys[i]).chunk());
  CHECK(index.size() == kChunks / 10 && index.memory() <= 128 * index.size());
}

}  // namespace

int main() {
  for (std::uint64_t seed = 1; seed < 6; ++seed) as_a_map(seed);
  memory();
}
