// Python binding of the key-value store: `fireflyer._native.kv`. The GIL serialises all calls but `Compaction.step`,
// which releases the GIL. It may do so because a compaction's memtables take no more operations and its tables have a
// separate cache.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "kv/memtable.hpp"
#include "kv/page_index.hpp"
#include "kv/table.hpp"
#include "kv/view.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ff::kv {

void bind(nb::module_ m);

namespace {

using Memtables = std::vector<std::shared_ptr<Memtable>>;

std::string_view text(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }
nb::bytes bytes_of(std::string_view text) { return nb::bytes(text.data(), text.size()); }

nb::object described(const std::optional<Need>& need) { return nb::make_tuple(need->table, need->block); }

View view_of(const Memtables& memtables, std::vector<Run> runs, std::uint64_t sequence) {
  return {{memtables.begin(), memtables.end()}, std::move(runs), sequence};
}

nb::object get(const View& view, const nb::bytes& key, std::int64_t now) {
  Record record;
  std::shared_ptr<const Block> holder;
  std::optional<Need> need;
  switch (find(view, text(key), record, holder, need)) {
    case Found::blocked: return described(need);
    case Found::no: return nb::none();
    case Found::yes: break;
  }
  if (!record.visible(now)) return nb::none();
  return bytes_of(record.value);
}

// Returns (items, rest). `rest` is the (table, block) to supply before the next call, true at the end, else false.
nb::tuple next_items(Scan& scan, std::int64_t now, std::size_t items, std::size_t most) {
  Merge& merge = scan.merge();
  merge.refresh();
  nb::list found;
  std::size_t bytes = 0;
  while (found.size() < items && (bytes == 0 || bytes < most)) {
    switch (merge.look()) {
      case Merge::State::ended: return nb::make_tuple(found, true);
      case Merge::State::blocked: return nb::make_tuple(found, described(merge.need()));
      case Merge::State::record: break;
    }
    const Record& record = merge.record();
    if (record.visible(now)) {
      found.append(nb::make_tuple(bytes_of(record.key), bytes_of(record.value)));
      bytes += record.key.size() + record.value.size();
    }
    merge.pass();
  }
  return nb::make_tuple(found, false);
}

nb::object step(Compaction& compaction) {
  Compaction::State state;
  {
    const nb::gil_scoped_release release;
    state = compaction.step();
  }
  if (state == Compaction::State::blocked) return described(compaction.need());
  return nb::bool_(state == Compaction::State::ended);
}

nb::object take(Compaction& compaction) {
  std::optional<TableBuilder::Whole> whole = compaction.take();
  if (!whole) return nb::none();
  return nb::make_tuple(bytes_of(whole->bytes), bytes_of(whole->first), bytes_of(whole->last), whole->index_offset,
                        whole->index_bytes, whole->records);
}

// Entry of the head of a segment (kv/pages/layout.py).
struct [[gnu::packed]] Entry {
  char digest[kDigest];
  std::uint32_t unit, bytes, crc, salt;
  std::uint16_t position, zero;
};
static_assert(sizeof(Entry) == 36);

std::size_t digests_in(std::string_view all) {
  if (all.size() % kDigest != 0) throw Error(Code::invalid, "a digest has 16 bytes");
  return all.size() / kDigest;
}

std::string_view digest_at(std::string_view all, std::size_t at) { return all.substr(at * kDigest, kDigest); }

void insert_all(PageIndex& index, std::uint32_t segment, const nb::bytes& entries,
                const std::vector<std::uint32_t>& salts) {
  const std::string_view all = text(entries);
  if (all.size() % sizeof(Entry) != 0) throw Error(Code::invalid, "an entry has 36 bytes");
  index.begin(segment);
  for (std::size_t at = 0; at < all.size(); at += sizeof(Entry)) {
    Entry entry;
    std::memcpy(&entry, all.data() + at, sizeof entry);
    if (entry.salt >= salts.size()) throw Error(Code::corrupted, "a page names a salt that its segment lacks");
    index.insert({entry.digest, kDigest},
                 {segment, entry.unit, entry.bytes, entry.crc, salts[entry.salt], entry.position, 0});
  }
}

std::size_t leading(const PageIndex& index, const nb::bytes& digests, std::size_t from) {
  const std::string_view all = text(digests);
  const std::size_t count = digests_in(all);
  std::size_t at = from;
  while (at < count && index.holds(digest_at(all, at))) ++at;
  return at;
}

nb::list find_all(PageIndex& index, const nb::bytes& digests, bool hit) {
  const std::string_view all = text(digests);
  nb::list found;
  for (std::size_t at = 0; at < digests_in(all); ++at) {
    if (hit) index.hit(digest_at(all, at));
    const std::optional<Page> page = index.find(digest_at(all, at));
    if (page) found.append(nb::make_tuple(page->segment, page->unit * kPageUnit, page->bytes, page->crc, page->hits));
    else found.append(nb::none());
  }
  return found;
}

void bind_pages(nb::module_ m) {
  m.attr("PAGE_UNIT") = kPageUnit;
  nb::class_<PageIndex>(m, "PageIndex", "Index of a page cache: 16-byte digest of a key -> place of its page.")
      .def(nb::init<>())
      .def("insert", &insert_all, "segment"_a, "entries"_a, "salts"_a,
           "Adds the pages of a new segment. A digest that is already known moves to that segment. `salts[i]`: number "
           "of the salt of entries that have salt index i.")
      .def("leading", &leading, "digests"_a, "start"_a = 0,
           "Index of the first digest from `start` on that is unknown; the number of digests if all are known.")
      .def("find", &find_all, "digests"_a, "hit"_a,
           nb::sig("def find(self, digests: bytes, hit: bool) -> list[tuple[int, int, int, int, int] | None]"),
           "Returns (segment, offset, bytes, CRC32C, hits) of each digest, or None. `hit`: count a use.")
      .def(
          "remove",
          [](PageIndex& index, const nb::bytes& digest, std::uint32_t segment) { index.remove(text(digest), segment); },
          "digest"_a, "segment"_a, "Removes a page if it lies in this segment.")
      .def("forget", &PageIndex::forget, "segment"_a, "Removes a segment and its pages.")
      .def("bytes_of", &PageIndex::bytes_of, "salt"_a, "Bytes of the pages with this salt.")
      .def("__len__", &PageIndex::pages)
      .def_prop_ro("memory", &PageIndex::memory, "Bytes of the table.");
}

}  // namespace

void bind(nb::module_ m) {
  bind_pages(m);
  m.doc() = "Sorted tables, memtables and the index of the page cache. No I/O.";
  m.attr("MOST_KEY") = kMostKey;
  m.attr("MOST_VALUE") = kMostValue;
  m.attr("TRAILER_BYTES") = kTrailer;
  nb::class_<Memtable>(m, "Memtable", "Recent operations in the order of their keys.")
      .def(nb::init<>())
      .def(
          "apply",
          [](Memtable& memtable, const nb::bytes& operations, std::size_t offset, std::uint64_t sequence) {
            if (offset > operations.size()) throw Error(Code::invalid, "the offset lies beyond the frame");
            return memtable.apply(text(operations).substr(offset), sequence);
          },
          "frame"_a, "offset"_a, "sequence"_a,
          "Adds the operations of a log frame from `offset` on; returns their number. Raises Corrupted.")
      .def("__len__", [](const Memtable& memtable) { return memtable.map().size(); })
      .def_prop_ro("bytes", &Memtable::bytes, "Approximate memory in bytes.");
  nb::class_<BlockCache>(m, "BlockCache", "Blocks of tables in memory, at most `capacity` bytes.")
      .def(nb::init<std::size_t>(), "capacity"_a)
      .def_prop_ro("bytes", &BlockCache::bytes);
  nb::class_<Table>(m, "Table", "Sorted table, whose file the caller reads.")
      .def(nb::new_([](const std::string& name, const nb::bytes& first, const nb::bytes& last,
                       std::uint64_t index_offset, std::uint64_t index_bytes, std::shared_ptr<BlockCache> cache) {
             return std::make_shared<Table>(name, std::string(text(first)), std::string(text(last)), index_offset,
                                            index_bytes, std::move(cache));
           }),
           "name"_a, "first"_a, "last"_a, "index_offset"_a, "index_bytes"_a, "cache"_a)
      .def_prop_ro("name", &Table::name)
      .def_prop_ro("blocks", &Table::count, "Number of blocks; 0 before the index is supplied.")
      .def("range", &Table::range, "block"_a, "most"_a = 0,
           "(offset, bytes) of the index for block -1; else of this block and the missing ones after it, at most "
           "`most` bytes.")
      .def(
          "supply", [](Table& table, std::uint64_t offset, const nb::bytes& data) { table.supply(offset, text(data)); },
          "offset"_a, "data"_a, "Supplies the bytes of a range. Raises Corrupted.");
  nb::class_<View>(m, "View", "Memtables and runs of tables, newest first, up to a sequence number.")
      .def(
          "__init__",
          [](View* self, const Memtables& memtables, std::vector<Run> runs, std::uint64_t sequence) {
            new (self) View(view_of(memtables, std::move(runs), sequence));
          },
          "memtables"_a, "runs"_a, "sequence"_a)
      .def_rw("sequence", &View::sequence)
      .def("copy", [](const View& view) { return View(view); })
      .def("get", &get, "key"_a, "now"_a,
           nb::sig("def get(self, key: bytes, now: int) -> bytes | tuple[Table, int] | None"),
           "Returns the value, None, or the (table, block) to supply before another try. `now`: ms since 1970.");
  nb::class_<Scan>(m, "Scan", "Walk through the visible records of a view, in the order of keys.")
      .def(
          "__init__",
          [](Scan* self, View view, const nb::bytes& start, const std::optional<nb::bytes>& end) {
            new (self) Scan(std::move(view), text(start), end ? std::optional(std::string(text(*end))) : std::nullopt);
          },
          "view"_a, "start"_a, "end"_a.none())
      .def("next", &next_items, "now"_a, "items"_a, "most"_a,
           nb::sig("def next(self, now: int, items: int, most: int) -> "
                   "tuple[list[tuple[bytes, bytes]], tuple[Table, int] | bool]"),
           "Returns at most `items` pairs of about `most` bytes, and a second value: the (table, block) to supply "
           "before the next call, True at the end, else False.");
  nb::class_<Compaction>(m, "Compaction", "Writes a view as tables.")
      .def(nb::init<View, std::size_t, bool, std::int64_t>(), "view"_a, "target"_a, "bottom"_a, "dead_before"_a,
           "`bottom`: leave out deletions, and records that expired before `dead_before` (ms).")
      .def("step", &step, nb::sig("def step(self) -> bool | tuple[Table, int]"),
           "Returns the (table, block) to supply; or, when a table is ready for `take`, whether it is the last one.")
      .def("take", &take, nb::sig("def take(self) -> tuple[bytes, bytes, bytes, int, int, int] | None"),
           "(bytes, first key, last key, offset of the index, its bytes, records), or None without records.");
}

}  // namespace ff::kv
