// Chunks of one target that were found damaged and not seen whole since, the times of their next checks, and findings
// not yet reported.
//
// Thread contract: not thread-safe; the target's lock guards it.
// Invariant: each of at most kMost chunks gives one finding when it is found damaged, and one when it is whole again.
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
    bool damaged = false;  // false: whole again, because it was repaired, overwritten or removed
  };
  struct Findings {
    std::vector<Finding> first;  // in order of discovery
    std::uint64_t more = 0;      // number of findings beyond those in `first`
  };

  // Returns whether the finding is new.
  bool found(ChunkId chunk);
  void whole(ChunkId chunk);
  bool holds(ChunkId chunk) const { return chunks_.contains(chunk); }
  std::size_t size() const { return chunks_.size(); }
  // Returns the chunks to check now, in rotation; empty until a pause has passed since the last time.
  std::vector<ChunkId> due();
  // Returns the findings since the last call.
  Findings findings();

 private:
  void note(ChunkId chunk, bool damaged);

  std::set<ChunkId> chunks_;
  ChunkId last_;              // the last chunk that was due
  Clock::time_point next_{};  // time before which no chunk is due
  Findings findings_;
};

}  // namespace ff::fs3::io
