// The part of a checked read that bypasses the page cache.
//
// Thread contract: several threads may call `read_runs` on the same runs at once. `next` is the index of the first run
// that no thread has taken.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "storage/segment_file.hpp"

namespace ff::storage {

constexpr unsigned kBlocks = 7;  // number of read buffers of all threads together; each has a little more than 4 MiB

// Jobs [first, last), which together span at most kMostSegment bytes of one file.
struct Run {
  std::size_t first;
  std::size_t last;
  std::int64_t offset;  // of the first byte
  std::int64_t end;     // after the last byte
};

// Groups jobs into runs. REQUIRES: jobs sorted by file and offset.
std::vector<Run> runs_of(const std::vector<Job>& jobs);

// Takes runs from `next` on until none is left, and reads them with O_DIRECT. The bytes go through `blocks` read
// buffers. If options.in_place, a run that is one segment of aligned whole pages goes directly to its target. Throws
// SegmentError.
void read_runs(const std::vector<Job>& jobs, const std::vector<Run>& runs, std::atomic<std::size_t>& next,
               unsigned blocks, const ReadOptions& options);

}  // namespace ff::storage
