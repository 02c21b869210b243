// A record file of either version, open for reading: the places of its samples, and positioned reads.
//
// Threads: every method may run on any number of threads at once, and after fork. Nothing changes after opening, and
// reads never move the file position.
//
// Invariant: at(i) lies inside [0, size()), or at() throws, even if the mapped index has changed.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

namespace ff::ffrecord {

// A file descriptor that the destructor closes.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor();
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

// The beginning of a file, mapped for reading.
class Mapping {
 public:
  Mapping() = default;
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  void map(int fd, std::int64_t bytes, const std::string& path);
  const unsigned char* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }

 private:
  unsigned char* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

enum Codec : std::uint32_t { kPlain = 0, kZstd = 1 };

// Place of a sample; the layout of an index entry of v2.
struct Extent {
  std::int64_t offset;
  std::int64_t bytes;   // bytes of the sample in the file
  std::int64_t raw;     // bytes of the sample after decompression; equal to `bytes` for kPlain
  std::uint32_t crc;    // CRC32 of the bytes in the file
  std::uint32_t codec;  // Codec
};
static_assert(sizeof(Extent) == 32);

// A run: samples [first, first + count) are in the index pages from `place` on.
struct Run {
  std::int64_t first;
  std::int64_t place;
  std::int64_t count;
};
static_assert(sizeof(Run) == 24);

std::string hex(std::uint32_t value);
// Throws Code::corrupted with a message that names the record file and says `what` is wrong.
[[noreturn]] void damaged(const std::string& name, const std::string& what);

class RecordFile {
 public:
  // Opens `path` and checks its metadata. Throws Code::storage when it cannot be read, Code::corrupted when
  // the metadata does not match its checksum or the size of the file.
  static std::unique_ptr<RecordFile> open(std::string path);
  virtual ~RecordFile() = default;
  RecordFile(const RecordFile&) = delete;
  RecordFile& operator=(const RecordFile&) = delete;

  virtual int version() const = 0;
  virtual std::int64_t count() const = 0;
  // REQUIRES: 0 <= i < count(), and check_mapped() returned recently. Throws Code::corrupted if the part of the index
  // with sample i is damaged.
  virtual Extent at(std::int64_t i) const = 0;
  // Returns the offset of the index page that at(i) will check, and for which at(i) may have to wait for the disk.
  // Returns -1 if the page is checked already. REQUIRES: 0 <= i < count().
  virtual std::int64_t unread(std::int64_t /*i*/) const { return -1; }
  // Returns false for a v1 file that was written without a metadata checksum (it is 0), and true for other files.
  virtual bool metadata_checked() const { return true; }
  // Returns the columns as JSON; empty if the file has none.
  virtual std::string schema() const { return {}; }

  const std::string& path() const { return path_; }
  int fd() const { return fd_.get(); }
  // Returns the size in bytes that the file had when it was opened; for a v2 file, the byte at which the last commit
  // ended.
  std::int64_t size() const { return size_; }

  // Throws Code::corrupted if the file has become shorter than the mapped index, because an access to the mapping would
  // then raise SIGBUS.
  void check_mapped() const;

  // Fills the buffers of `parts` with the bytes from `offset` on; consumes `parts`. Throws Code::corrupted if the file
  // became shorter than when it was opened.
  void read(iovec* parts, int count, std::int64_t offset) const;
  void read(void* data, std::size_t size, std::int64_t offset) const;

  // Throws Code::corrupted, naming sample i, if `found`, the CRC32 of the sample's bytes, differs from extent.crc.
  void compare(std::int64_t i, const Extent& extent, std::uint32_t found) const;
  // Throws Code::corrupted: the file ends at `offset`, before the end that it had when it was opened.
  [[noreturn]] void ends_at(std::int64_t offset) const;

  // Reads and checks all samples with a buffer of 1 MiB.
  void check_all() const;

 protected:
  RecordFile(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}
  std::int64_t file_size() const;
  [[noreturn]] void corrupted(const std::string& what) const { damaged(path_, what); }

  std::int64_t size_ = 0;
  Mapping mapping_;

 private:
  std::string path_;
  Descriptor fd_;
};

}  // namespace ff::ffrecord
