// Tables return what was written, in order; damaged bytes are refused; the cache keeps to its bound; the page index agrees
// with a map.
#include "kv/table.hpp"

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/testing/check.hpp"
#include "base/testing/one_thread.hpp"
#include "kv/page_index.hpp"
#include "kv/view.hpp"

namespace {

using namespace ff::kv;

std::string key_of(int number) {
  char text[16];
  std::snprintf(text, sizeof text, "%06d", number);
  return text;
}

TableBuilder::Whole table_of(int count, std::size_t value) {
  TableBuilder builder;
  for (int i = 0; i < count; ++i) {
    const std::string key = key_of(2 * i), text(value, static_cast<char>('a' + i % 26));
    builder.add({key, text, static_cast<std::uint64_t>(i), 0, Kind::put});
  }
  return *builder.finish();
}

std::shared_ptr<Table> opened(const TableBuilder::Whole& whole, std::shared_ptr<BlockCache> cache) {
  return std::make_shared<Table>("t", whole.first, whole.last, whole.index_offset, whole.index_bytes, std::move(cache));
}

void supply(const TableBuilder::Whole& whole, const ff::kv::Need& need, std::uint64_t most) {
  const auto [offset, size] = need.table->range(need.block, most);
  need.table->supply(offset, std::string_view(whole.bytes).substr(offset, size));
}

void finds_every_key_and_no_other() {
  const TableBuilder::Whole whole = table_of(3000, 40);
  const auto cache = std::make_shared<BlockCache>(40000);
  const View view{{}, {{opened(whole, cache)}}, ~0ull};
  for (int number = -1; number < 6003; ++number) {
    Record record;
    std::shared_ptr<const Block> holder;
    std::optional<Need> need;
    Found found = Found::blocked;
    const std::string key = number < 0 ? "!" : key_of(number);
    while ((found = find(view, key, record, holder, need)) == Found::blocked) supply(whole, *need, 0);
    CHECK((found == Found::yes) == (number >= 0 && number < 6000 && number % 2 == 0));
    CHECK(cache->bytes() <= 40000);
  }
}

void a_merge_prefers_the_newest_and_drops_deletions_at_the_bottom() {
  const TableBuilder::Whole whole = table_of(1000, 10);
  auto memtable = std::make_shared<Memtable>();
  std::string operations;
  for (int i = 0; i < 1000; i += 4) {
    const std::string key = key_of(2 * i);
    ff::kv::append(operations, static_cast<std::uint8_t>(i % 8 == 0 ? Kind::erase : Kind::put));
    ff::kv::append(operations, static_cast<std::uint32_t>(key.size()));
    ff::kv::append(operations, static_cast<std::uint32_t>(i % 8 == 0 ? 0 : 3));
    ff::kv::append(operations, std::int64_t{0});
    operations += key;
    if (i % 8 != 0) operations += "new";
  }
  CHECK(memtable->apply(operations, 5000) == 250);
  Compaction compaction({{memtable}, {{opened(whole, std::make_shared<BlockCache>(0))}}, ~0ull}, 1 << 30, true, 0);
  Compaction::State state;
  while ((state = compaction.step()) == Compaction::State::blocked) supply(whole, *compaction.need(), 1 << 20);
  CHECK(state == Compaction::State::ended);
  CHECK(compaction.take()->records == 875);
}

void refuses_every_flipped_bit() {
  const TableBuilder::Whole whole = table_of(100, 20);
  std::mt19937 random(7);
  for (int turn = 0; turn < 400; ++turn) {
    TableBuilder::Whole damaged = whole;
    // Every third turn damages the index or the trailer.
    const std::size_t tail = whole.index_bytes + kTrailer;
    const std::size_t at = turn % 3 == 0 ? whole.bytes.size() - 1 - random() % tail : random() % whole.bytes.size();
    damaged.bytes[at] = static_cast<char>(damaged.bytes[at] ^ (1 << random() % 8));
    const auto table = opened(damaged, std::make_shared<BlockCache>(1 << 20));
    bool refused = false;
    try {
      supply(damaged, {table, -1}, 0);
      for (std::size_t block = 0; block < table->count(); ++block)
        supply(damaged, {table, static_cast<std::int64_t>(block)}, 0);
    } catch (const ff::Error& error) {
      refused = error.code() == ff::Code::corrupted;
    }
    CHECK(refused);
  }
}

void the_index_agrees_with_a_map() {
  std::mt19937 random(3);
  PageIndex index;
  std::map<std::string, std::uint32_t> model;  // the segment of each page
  std::uint32_t newest = 0;
  index.begin(newest);
  for (int turn = 0; turn < 60000; ++turn) {
    std::string digest(kDigest, '\0');
    const auto number = static_cast<std::uint32_t>(random() % 9000);
    std::memcpy(digest.data(), &number, sizeof number);
    std::mt19937 spread(number);
    for (std::size_t i = 4; i < 8; ++i) digest[i] = static_cast<char>(spread());
    const auto known = model.find(digest);
    if (turn % 2000 == 1999) index.begin(++newest);
    if (turn % 5000 == 4999) {  // forgets the oldest segment that is left
      const auto oldest = static_cast<std::uint32_t>(turn / 5000);
      index.forget(oldest);
      std::erase_if(model, [oldest](const auto& page) { return page.second == oldest; });
    } else if (random() % 3 != 0) {
      index.insert(digest, {newest, 1, 100, 0, number % 3, 0, 0});
      model[digest] = newest;
    } else if (known != model.end()) {
      index.remove(digest, known->second + 1);  // the page lies in another segment, so it stays
      CHECK(index.holds(digest));
      index.remove(digest, known->second);
      model.erase(known);
    }
    CHECK(index.holds(digest) == model.contains(digest));
    CHECK(index.pages() == model.size());
  }
  CHECK(index.bytes_of(0) + index.bytes_of(1) + index.bytes_of(2) == 100 * model.size() && !model.empty());
  for (const auto& [digest, segment] : model) CHECK(index.find(digest)->segment == segment);
  for (int turn = 0; turn < 300; ++turn) index.hit(model.begin()->first);
  CHECK(index.find(model.begin()->first)->hits == 255);
}

}  // namespace

int main() {
  finds_every_key_and_no_other();
  a_merge_prefers_the_newest_and_drops_deletions_at_the_bottom();
  refuses_every_flipped_bit();
  the_index_agrees_with_a_map();
}
