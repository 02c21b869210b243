// The part of a checked read that bypasses the page cache.
//
// Thread contract: several threads may call `read_runs` on the same runs at once and share them by `next`.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "storage/segment_file.hpp"

namespace ff::storage {

constexpr unsigned kBlocks = 7;  // total of all threads, of a little more than 4 MiB each

// Jobs [first, last) of one file that lie within kMostSegment bytes of it.
struct Run {
  std::size_t first;
  std::size_t last;
  std::int64_t offset;  // of the first byte
  std::int64_t end;     // after the last byte
};

// REQUIRES: jobs sorted by file and place.
std::vector<Run> runs_of(const std::vector<Job>& jobs);

// Reads runs, from `next` on until none is left, through `blocks` blocks of memory or, if `in_place`,
// straight to whole segments at aligned places. Throws SegmentError.
void read_runs(const std::vector<Job>& jobs, const std::vector<Run>& runs, std::atomic<std::size_t>& next,
               unsigned blocks, const ReadOptions& options);

}  // namespace ff::storage
