// One file of a checked read, and the operations on one of its segments.
//
// Thread contract: any number of threads may call all methods at once. The atomic flags are hints: they change how
// bytes are read, not which bytes.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "storage/checked_read.hpp"

namespace ff::storage {

class SegmentFile;

// One segment to read.
struct Job {
  const Segment* segment;
  SegmentFile* file;
  std::size_t number;  // number of the segment, for errors

  std::int64_t end() const { return segment->offset + segment->bytes; }
  // Throws SegmentError unless `crc` equals the segment's CRC.
  void compare(std::uint32_t crc) const;
  [[noreturn]] void fail(int error) const;
  [[noreturn]] void ends_at(std::int64_t offset) const;
};

class SegmentFile {
 public:
  // Throws SegmentError, naming `segment`, if the file cannot be opened.
  SegmentFile(const std::string& path, std::size_t segment);
  ~SegmentFile();
  SegmentFile(const SegmentFile&) = delete;
  SegmentFile& operator=(const SegmentFile&) = delete;

  const std::string& path() const { return path_; }
  // Copies a whole segment of a file in memory (tmpfs) to its place and computes its CRC. Returns false if that is
  // impossible; the caller then uses read(). If the file is truncated meanwhile, SIGBUS may end the process.
  bool copy(const Job& job, std::uint32_t& crc) const;
  // Reads up to `most` bytes of a segment, from byte `at` of the segment on, to the same position of its target. Returns
  // 0 only if `wait` is false and the next byte is not in the page cache. Throws SegmentError.
  std::int64_t read(const Job& job, std::int64_t at, std::int64_t most, bool wait);
  // Returns a descriptor opened with O_DIRECT, or the plain one if the file system refuses O_DIRECT.
  int direct();
  void refuse_direct() { refused_ = true; }
  int plain() const { return fd_; }

 private:
  void map();

  const std::string path_;
  int fd_;
  int direct_;
  const char* mapped_ = nullptr;  // mapping of the file on tmpfs; nullptr for other files
  std::int64_t size_ = 0;         // bytes of the mapping: the file's size when it was opened
  std::atomic<bool> refused_ = false;
  std::atomic<bool> waits_ = false;  // the file system does not support RWF_NOWAIT
};

}  // namespace ff::storage
