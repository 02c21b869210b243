#include "kv/view.hpp"

#include <algorithm>

namespace ff::kv {

namespace {

// Returns the index of the first table whose last key is at least `key`.
std::size_t table_of(const Run& run, std::string_view key) {
  const auto place =
      std::lower_bound(run.begin(), run.end(), key,
                       [](const std::shared_ptr<Table>& its, std::string_view wanted) { return its->last() < wanted; });
  return place - run.begin();
}

}  // namespace

Found find(const View& view, std::string_view key, Record& record, std::shared_ptr<const Block>& holder,
           std::optional<Need>& need) {
  for (const auto& memtable : view.memtables)
    if (memtable->find(key, view.sequence, record)) return Found::yes;
  for (const Run& run : view.runs) {
    const std::size_t at = table_of(run, key);
    if (at == run.size() || run[at]->first() > key) continue;
    Table& table = *run[at];
    if (!table.indexed()) {
      need = Need{run[at], -1};
      return Found::blocked;
    }
    const std::size_t number = table.block_of(key);
    if (number == table.count()) continue;
    holder = table.block(number);
    if (!holder) {
      need = Need{run[at], static_cast<std::int64_t>(number)};
      return Found::blocked;
    }
    const std::size_t place = holder->lower_bound(key);
    if (place == holder->count()) continue;
    record = holder->record(place);
    if (record.key == key) return Found::yes;
  }
  return Found::no;
}

Cursor::Cursor(std::shared_ptr<const Memtable> memtable, std::uint64_t sequence, std::string_view start)
    : memtable_(std::move(memtable)), place_(memtable_->map().lower_bound(start)), sequence_(sequence) {
  settle_memory();
}

Cursor::Cursor(Run run, std::string_view start) : run_(std::move(run)), start_(start), table_(table_of(run_, start)) {
  settle_table();
}

void Cursor::resume() {
  if (need_) settle_table();
}

void Cursor::refresh() {
  if (memtable_ && !ended_) settle_memory();
}

void Cursor::next() {
  if (memtable_) {
    ++place_;
    settle_memory();
  } else {
    ++at_;
    settle_table();
  }
}

void Cursor::settle_memory() {
  for (; place_ != memtable_->map().end(); ++place_) {
    const Memtable::Version* const version = Memtable::newest(place_->second, sequence_);
    if (version == nullptr) continue;
    record_ = {place_->first, version->value, version->sequence, version->expires, version->kind};
    return;
  }
  ended_ = true;
}

void Cursor::settle_table() {
  need_.reset();
  for (; table_ < run_.size(); ++table_, placed_ = false) {
    Table& table = *run_[table_];
    if (!table.indexed()) {
      need_ = Need{run_[table_], -1};
      return;
    }
    if (!placed_) {
      block_ = table.block_of(start_);
      holder_.reset();
      placed_ = true;
    }
    for (; block_ < table.count(); ++block_, holder_.reset()) {
      if (!holder_) {
        holder_ = table.block(block_);
        if (!holder_) {
          need_ = Need{run_[table_], static_cast<std::int64_t>(block_)};
          return;
        }
        at_ = holder_->lower_bound(start_);
      }
      if (at_ < holder_->count()) {
        record_ = holder_->record(at_);
        return;
      }
    }
  }
  holder_.reset();
  ended_ = true;
}

Merge::Merge(const View& view, std::string_view start, std::optional<std::string> end) : end_(std::move(end)) {
  for (const auto& memtable : view.memtables) cursors_.emplace_back(memtable, view.sequence, start);
  for (const Run& run : view.runs) cursors_.emplace_back(run, start);
}

Merge::State Merge::look() {
  need_.reset();
  bool found = false;
  for (std::size_t at = 0; at < cursors_.size(); ++at) {
    Cursor& cursor = cursors_[at];
    if (cursor.ended()) continue;
    cursor.resume();
    if (cursor.ended()) continue;
    if (cursor.need()) {
      need_ = cursor.need();
      return State::blocked;
    }
    if (!found || cursor.record().key < cursors_[smallest_].record().key) smallest_ = at;
    found = true;
  }
  return !found || (end_ && record().key >= *end_) ? State::ended : State::record;
}

void Merge::pass() {
  const std::string key(record().key);
  for (Cursor& cursor : cursors_)
    if (!cursor.ended() && cursor.record().key == key) cursor.next();
}

Compaction::State Compaction::step() {
  while (builder_.bytes() < target_) {
    switch (merge_.look()) {
      case Merge::State::blocked: return State::blocked;
      case Merge::State::ended: return State::ended;
      case Merge::State::record: break;
    }
    const Record& record = merge_.record();
    if (!bottom_ || record.visible(dead_before_)) builder_.add(record);
    merge_.pass();
  }
  return State::full;
}

}  // namespace ff::kv
