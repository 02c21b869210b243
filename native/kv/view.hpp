// One state of the store: memtables and runs of tables, newest first, up to a sequence number.
//
// A run is a list of tables whose key ranges ascend and do not overlap. Memtables and runs are the sources of a view.
// If several sources have a version of a key, the first such source decides, because it is the newest.
//
// Thread contract: that of the tables. A view may be merged by any one thread if its memtables take no more operations
// and its tables have a separate cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kv/memtable.hpp"
#include "kv/table.hpp"

namespace ff::kv {

using Run = std::vector<std::shared_ptr<Table>>;

struct View {
  std::vector<std::shared_ptr<const Memtable>> memtables;
  std::vector<Run> runs;
  std::uint64_t sequence = 0;
};

enum class Found { yes, no, blocked };

// Looks a key up. While the view exists, `holder` keeps the slices of `record` alive. Sets `need` if it returns
// Found::blocked.
Found find(const View& view, std::string_view key, Record& record, std::shared_ptr<const Block>& holder,
           std::optional<Need>& need);

// Walks through a source in the order of keys. While `need` is set, the cursor does not move; after the range was
// supplied, call resume().
class Cursor {
 public:
  Cursor(std::shared_ptr<const Memtable> memtable, std::uint64_t sequence, std::string_view start);
  Cursor(Run run, std::string_view start);

  void resume();   // tries again to read the needed range
  void refresh();  // call after operations were added to the memtable: they may have moved the record's value
  bool ended() const { return ended_; }
  const std::optional<Need>& need() const { return need_; }
  const Record& record() const { return record_; }  // REQUIRES: not ended, no need
  void next();

 private:
  void settle_memory();
  void settle_table();

  std::shared_ptr<const Memtable> memtable_;
  Memtable::Map::const_iterator place_;
  std::uint64_t sequence_ = 0;
  Run run_;
  std::string start_;  // first key of the walk, for tables that the cursor has not entered
  std::size_t table_ = 0, block_ = 0, at_ = 0;
  bool placed_ = false;  // true if block_ and at_ are valid for table_
  std::shared_ptr<const Block> holder_;
  std::optional<Need> need_;
  Record record_;
  bool ended_ = false;
};

// Merges the sources of a view: each key once, with its newest version, deletions included.
class Merge {
 public:
  Merge(const View& view, std::string_view start, std::optional<std::string> end);

  enum class State { record, blocked, ended };
  State look();  // if it returns State::record, record() is the next record
  const Record& record() const { return cursors_[smallest_].record(); }
  void pass();  // moves behind the key of record(); invalidates the record's slices
  // Must be called before look() if a memtable may have got more operations.
  void refresh() {
    for (Cursor& cursor : cursors_) cursor.refresh();
  }
  const std::optional<Need>& need() const { return need_; }

 private:
  std::vector<Cursor> cursors_;
  std::optional<std::string> end_;
  std::optional<Need> need_;
  std::size_t smallest_ = 0;
};

// Walks through the visible records of a view. Keeps its current blocks in memory, even if the cache evicts them.
class Scan {
 public:
  Scan(View view, std::string_view start, std::optional<std::string> end)
      : view_(std::move(view)), merge_(view_, start, std::move(end)) {}
  Merge& merge() { return merge_; }

 private:
  View view_;
  Merge merge_;
};

// Writes a view as tables of about `target` bytes.
class Compaction {
 public:
  // `bottom`: no table is older than those of the view. Then deletions, and records that expired before `dead_before`
  // (ms), are left out.
  Compaction(View view, std::size_t target, bool bottom, std::int64_t dead_before)
      : view_(std::move(view)),
        merge_(view_, {}, std::nullopt),
        target_(target),
        bottom_(bottom),
        dead_before_(dead_before) {}

  enum class State { blocked, full, ended };
  State step();  // after State::full and State::ended, call `take`
  std::optional<TableBuilder::Whole> take() { return builder_.finish(); }
  const std::optional<Need>& need() const { return merge_.need(); }

 private:
  View view_;
  Merge merge_;
  TableBuilder builder_;
  std::size_t target_;
  bool bottom_;
  std::int64_t dead_before_;
};

}  // namespace ff::kv
