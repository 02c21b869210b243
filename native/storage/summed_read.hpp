// Reads ranges of files and computes the CRC32C of each, on several threads. A thread reads 256 KiB at a time and sums
// them while they are in the core's cache.
//
// The kernel's read-ahead fetches bytes that are not in the page cache, for a few ranges at once. It fills large
// folios. Later reads copy from large folios up to 1.5 times as fast as from the single pages that POSIX_FADV_WILLNEED
// creates.
//
// Thread contract: any thread, any number of calls at once. A call leaves nothing behind except threads of
// base/process/worker_pool.hpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace ff::storage {

struct SummedRange {
  std::size_t file;  // index of the path
  std::int64_t offset, bytes;
  char* target;
  std::uint32_t start;  // CRC32C of earlier bytes, which the range's CRC32C continues; 0 if there are none
};

// Fills the targets and returns the CRC32C of each range. Throws Error: corrupted if a file ends inside a range, storage
// if it cannot be read, invalid if a range's `file` is not an index of `paths`. After an error any target may have been
// written to.
std::vector<std::uint32_t> read_summed(const std::vector<std::string>& paths, const std::vector<SummedRange>& ranges);

}  // namespace ff::storage
