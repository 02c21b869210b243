// The chunks of one target that were found damaged and not seen whole since, when to look at them again, and what of it
// nobody has been told yet.
//
// Thread contract: none; the target's lock guards it.
// Invariant: each chunk among the first kMost is a finding once when it is found damaged, once when it is not any more.
#pragma once

#include <chrono>
#include <cstdint>
#include <set>
#include <vector>

#include "fs3/types.hpp"

namespace ff::fs3::io {

class Damage {
 public:
  using Clock = std::chrono::steady_clock;

  struct Finding {
    ChunkId chunk;
    bool damaged = false;  // or whole again: repaired, overwritten or removed
  };
  struct Findings {
    std::vector<Finding> first;  // in order
    std::uint64_t more = 0;      // that came after those
  };

  // Whether that is news.
  bool found(ChunkId chunk);
  void whole(ChunkId chunk);
  bool holds(ChunkId chunk) const { return chunks_.contains(chunk); }
  std::size_t size() const { return chunks_.size(); }
  // Those whose turn it is, in turns; none before a pause after the last time.
  std::vector<ChunkId> due();
  // Since the last call.
  Findings findings();

 private:
  void note(ChunkId chunk, bool damaged);

  std::set<ChunkId> chunks_;
  ChunkId last_;              // that was due
  Clock::time_point next_{};  // nothing is due before
  Findings findings_;
};

}  // namespace ff::fs3::io
