// One record file as used by the batch reader: reads that do not wait, the descriptor for direct reads, the mapping,
// and hints learned about them.
//
// Threads: all methods may run on any number of threads at once and after fork. Lazy members are created without a
// lock. The flags are hints: they change how bytes are read, never which bytes.
#pragma once

#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/vfs.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

#include "base/io/io_queue.hpp"
#include "ffrecord/format/record_file.hpp"

namespace ff::ffrecord {

// The kernel calls, for tests to replace. They return their result or a negative error number.
struct Calls {
  std::function<long(int fd, const iovec* parts, int count, std::int64_t offset, int flags)> preadv2;
  std::function<int(int fd)> open_direct;                   // opens the same file again with O_DIRECT
  std::function<std::unique_ptr<IoQueue>(unsigned)> queue;  // null if the kernel forbids it
  std::function<int(const void* start, std::size_t bytes, unsigned char* present)> mincore;
  std::function<void(int fd, std::int64_t offset, std::int64_t bytes)> will_need;  // starts reading into the page cache
  std::function<long()> waits;  // page faults of this thread so far that waited for the disk
  std::function<int(int fd, struct statfs* found)> fstatfs;
};
const Calls& kernel();

// A whole file, mapped into memory, and marks of its verified samples. Views on the mapping keep it alive.
class MappedFile {
 public:
  // Throws what throw_errno does.
  explicit MappedFile(const RecordFile& file);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  const std::uint8_t* data() const { return data_; }
  std::size_t size() const { return size_; }
  bool verified(std::int64_t sample) const;
  void set_verified(std::int64_t sample) const;
  // Returns whether all pages of a range are in memory; true if the kernel hides that from this user.
  bool resident(std::int64_t offset, std::int64_t bytes, const Calls& calls) const;

 private:
  std::size_t size_;
  const std::uint8_t* data_;
  std::uint64_t* words_;  // one bit per sample; its pages are populated as they are used
  std::size_t marks_;     // bytes of `words_`
};

class Source {
 public:
  Source(const RecordFile& file, const Calls& calls) : file_(file), calls_(calls) {}
  ~Source();
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;

  const RecordFile& file() const { return file_; }

  // Fills `parts` from `offset` on and consumes them; returns the bytes read. Reads fewer bytes than `parts` hold only
  // if `wait` is false and the next bytes are not in the page cache. Throws Code::storage if a read fails, and
  // Code::corrupted if the file ends before these bytes.
  std::int64_t read(iovec* parts, int count, std::int64_t offset, bool wait);
  // Throws Code::corrupted unless `data`, the bytes of `sample`, match its checksum.
  void check(std::int64_t sample, const Extent& extent, const void* data) const;
  void compare(std::int64_t sample, const Extent& extent, std::uint32_t found) const;
  // Throws Code::corrupted if the file is shorter now than when it was opened.
  void check_size() const;
  [[noreturn]] void ends_at(std::int64_t offset) const;

  // Returns a descriptor for direct reads; negative if this file refuses them.
  int direct();
  void refuse_direct() { refused_ = true; }
  // Returns whether a range is in the page cache; true if the kernel hides that from this user.
  bool resident(std::int64_t offset, std::int64_t bytes);
  // Records that the page cache lacked bytes of a read. `asked`: resident() had returned true for them.
  void missed(bool asked);
  // Maps the file at the first call; throws what throw_errno does.
  const std::shared_ptr<const MappedFile>& mapping();
  // Returns null if the address space has no room.
  const MappedFile* try_mapping();
  long waits() const { return calls_.waits(); }
  // Returns whether the file is, or may be, on a network or FUSE file system. There the pages of a mapping may vanish
  // without notice, even for good.
  bool remote();

  // Result of the last check of the page cache.
  enum class Seen : std::uint8_t {
    nothing,
    gaps,   // bytes were missing: ask resident() first, because a failed read makes the kernel read into the cache
    whole,  // all of a batch of many samples was cached: small samples can be copied from the mapping
  };
  std::atomic<Seen> seen = Seen::nothing;
  // True if the kernel hides from this user which pages are cached: it always answered that they are, and was wrong
  // several times. A single wrong answer proves nothing: the page may be evicted between answer and read.
  std::atomic<bool> blind = false;

 private:
  const RecordFile& file_;
  const Calls& calls_;
  std::atomic<bool> told_no_ = false;  // the kernel reported a page as not cached: it does not hide the page cache
  std::atomic<int> wrong_ = 0;         // reads that missed the page cache although resident() returned true
  std::atomic<bool> waits_ = false;    // the file system does not support RWF_NOWAIT
  std::atomic<bool> refused_ = false;
  std::atomic<int> remote_ = -1;  // -1: unknown
  std::atomic<int> direct_ = -1;
  std::atomic<const std::shared_ptr<const MappedFile>*> mapping_ = nullptr;
};

}  // namespace ff::ffrecord
