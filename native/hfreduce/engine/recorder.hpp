// The flight recorder: the last operations of a group on this rank, to diagnose why the group broke.
//
// Thread-safe. Fixed size: recording allocates nothing.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <vector>

#include "hfreduce/types.hpp"

namespace ff::hfreduce {

struct Record {
  enum class State : std::uint32_t { queued = 1, running, done, failed, cancelled };
  std::uint64_t number;  // in the order of submission, from 0
  Call call;             // call.seq is valid once the operation runs
  State state;
  std::uint64_t submitted_ns, started_ns, ended_ns;  // monotonic clock; 0: not yet
};

class Recorder {
 public:
  static constexpr std::size_t kRecords = 256;

  std::uint64_t submitted(const Call& call);  // returns the number of the new operation
  void started(std::uint64_t number, const Call& call);
  void ended(std::uint64_t number, Record::State state);
  std::vector<Record> records() const;  // oldest first
  std::uint64_t submitted_so_far() const;

 private:
  Record* find(std::uint64_t number);

  mutable std::mutex mutex_;
  std::array<Record, kRecords> records_{};
  std::uint64_t next_ = 0;
};

}  // namespace ff::hfreduce
