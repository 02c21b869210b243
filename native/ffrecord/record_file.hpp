// One FFRecord v1 file, open for reading: its index in memory and positioned reads of its samples.
//
// Threads: immutable after the constructor; every method may run on any number of threads at once, and
// after fork, since reads never touch the file position.
//
// Invariants, established by the constructor or it throws:
//   offset(0) == 12 + 12 * count(),  offset(i) <= offset(i + 1),  offset(count()) == size of the file.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <string>
#include <vector>

namespace ff::ffrecord {

// A file descriptor, closed with its owner.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor();
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

// Where a sample lies in its file.
struct Extent {
  std::int64_t offset;
  std::int64_t bytes;   // in the file
  std::int64_t raw;     // of the sample: equal to `bytes` where it is stored as it is
  std::uint32_t crc;    // of the bytes in the file
  std::uint32_t codec;  // 0: stored as it is
};

class RecordFile {
 public:
  // Opens `path` and checks its index. Throws Code::storage when it cannot be read, Code::corrupted when
  // the metadata does not match its checksum, or the index does not match the size of the file.
  explicit RecordFile(std::string path);

  const std::string& path() const { return path_; }
  int fd() const { return fd_.get(); }
  std::int64_t size() const { return offsets_.back(); }  // when it was opened
  Extent at(std::int64_t i) const { return {offsets_[i], length(i), length(i), checksums_[i], 0}; }
  std::int64_t count() const { return static_cast<std::int64_t>(checksums_.size()); }
  const std::vector<std::uint32_t>& checksums() const { return checksums_; }
  const std::vector<std::int64_t>& offsets() const { return offsets_; }  // count() + 1 values
  std::int64_t length(std::int64_t i) const { return offsets_[i + 1] - offsets_[i]; }
  // False for a file whose metadata checksum is 0: written before there was one, or by a writer without it.
  bool metadata_checked() const { return metadata_checked_; }

  // Fills the buffers of `parts` with the bytes from `offset` on; consumes `parts`. Throws
  // Code::corrupted when the file has become shorter than it was when it was opened.
  void read(iovec* parts, int count, std::int64_t offset) const;

  // REQUIRES: `data` holds sample i. Throws Code::corrupted, naming the sample, when its CRC32 differs.
  void check(std::int64_t i, const void* data) const;

  // Reads the whole file once with a buffer of 1 MiB and checks every sample.
  void check_all() const;

 private:
  void load_index(std::int64_t size);
  [[noreturn]] void corrupted(const std::string& what) const;
  void compare(std::int64_t i, std::uint32_t found) const;

  std::string path_;
  Descriptor fd_;
  std::vector<std::uint32_t> checksums_;
  std::vector<std::int64_t> offsets_;
  bool metadata_checked_ = true;
};

}  // namespace ff::ffrecord
