#include "hfreduce/engine/recorder.hpp"

#include <algorithm>
#include <chrono>

namespace ff::hfreduce {
namespace {

std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(
      std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count());
}

}  // namespace

// Returns null if the record has been overwritten.
Record* Recorder::find(std::uint64_t number) {
  Record& record = records_[number % kRecords];
  return record.number == number ? &record : nullptr;
}

std::uint64_t Recorder::submitted(const Call& call) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t number = next_++;
  records_[number % kRecords] = {number, call, Record::State::queued, now_ns(), 0, 0};
  return number;
}

void Recorder::started(std::uint64_t number, const Call& call) {
  const std::lock_guard lock(mutex_);
  if (Record* record = find(number)) {
    record->call = call;
    record->state = Record::State::running;
    record->started_ns = now_ns();
  }
}

void Recorder::ended(std::uint64_t number, Record::State state) {
  const std::lock_guard lock(mutex_);
  if (Record* record = find(number)) {
    record->state = state;
    record->ended_ns = now_ns();
  }
}

std::uint64_t Recorder::submitted_so_far() const {
  const std::lock_guard lock(mutex_);
  return next_;
}

std::vector<Record> Recorder::records() const {
  const std::lock_guard lock(mutex_);
  std::vector<Record> all;
  for (std::uint64_t n = next_ - std::min<std::uint64_t>(next_, kRecords); n < next_; ++n) {
    all.push_back(records_[n % kRecords]);
  }
  return all;
}

}  // namespace ff::hfreduce
