// Reads many segments of files to their places in memory and compares the CRC32 of each, on several threads.
//
//   in the page cache:  preadv2 that does not wait, 256 KiB | crc32 while they are in the core's cache | next
//   in a tmpfs:         mapped, 16 KiB at a time: copied with stores past the caches | crc32 of the cached source
//   not cached:         runs of neighbours -> O_DIRECT reads of 1 MiB, many in flight -> own blocks
//                       -> crc32 and copy, 256 KiB at a time -> their places
//                       or, in_place: -> segments of whole pages at their places -> crc32
//
// Thread contract: any thread, any number of calls at once. A call leaves nothing behind except threads of
// base/process/worker_pool.hpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "storage/appender.hpp"

namespace ff::storage {

struct Segment {
  std::size_t file;
  std::int64_t offset;
  std::int64_t bytes;  // at most kMostSegment
  char* target;
  std::uint32_t crc;
};

constexpr std::int64_t kMostSegment = std::int64_t{4} << 20;

// An error of one segment: Code::corrupted for a file that is too short or a CRC mismatch, else Code::storage or
// no_space.
class SegmentError : public Error {
 public:
  SegmentError(Code code, const std::string& message, std::size_t segment) : Error(code, message), segment_(segment) {}
  std::size_t segment() const { return segment_; }  // index in the given list

 private:
  std::size_t segment_;
};

struct ReadOptions {
  unsigned threads = 0;  // 0: one per core, at most worker_pool::kMost
  bool direct = true;    // allows reads with O_DIRECT
  // The disk may write to the targets. REQUIRES: they are shared memory, or the process does not fork meanwhile,
  // because copy-on-write could move a page away.
  bool in_place = false;
  MakeQueue make = make_queue;
};

// Throws SegmentError for the first failed segment found, in no particular order; targets may then be partly written.
// Throws Code::invalid for impossible arguments.
void read_checked(const std::vector<std::string>& paths, const std::vector<Segment>& segments,
                  const ReadOptions& options = {});

}  // namespace ff::storage
