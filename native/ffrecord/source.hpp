// One record file as the batch reader uses it: reads that do not wait, the descriptor past the page cache, the
// mapping, and what was learned about them.
//
// Threads: all methods may run on any number of threads at once and after fork; what is made late is made without a
// lock, and the flags are hints that change how bytes are fetched, never which.
#pragma once

#include <sys/stat.h>
#include <sys/vfs.h>
#include <sys/uio.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

#include "base/io_queue.hpp"
#include "ffrecord/record_file.hpp"

namespace ff::ffrecord {

// The calls to the kernel, for tests to replace. They return what they say or a negative error number.
struct Calls {
  std::function<long(int fd, const iovec* parts, int count, std::int64_t offset, int flags)> preadv2;
  std::function<int(int fd)> open_direct;                       // the same file, opened again with O_DIRECT
  std::function<std::unique_ptr<IoQueue>(unsigned)> queue;    // none where the kernel bars it
  std::function<int(const void* start, std::size_t bytes, unsigned char* present)> mincore;
  std::function<void(int fd, std::int64_t offset, std::int64_t bytes)> will_need;  // starts to read it into the cache
  std::function<long()> waits;  // page faults of this thread so far that had to wait for the disk
  std::function<int(int fd, struct statfs* found)> fstatfs;
};
const Calls& kernel();

// A whole file in memory, and which of its samples were found right. Views on it keep it alive.
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
  // Whether all pages of a range are in memory, as far as the kernel tells this user.
  bool resident(std::int64_t offset, std::int64_t bytes, const Calls& calls) const;

 private:
  std::size_t size_;
  const std::uint8_t* data_;
  std::uint64_t* words_;  // a bit a sample; pages of it come as they are used
  std::size_t marks_;     // bytes of them
};

class Source {
 public:
  Source(const RecordFile& file, const Calls& calls) : file_(file), calls_(calls) {}
  ~Source();
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;

  const RecordFile& file() const { return file_; }

  // Fills `parts` from `offset` on and consumes them; returns the bytes read. Fewer than there is room for only if
  // not `wait` and the next ones are not in the page cache. Throws Code::storage, or Code::corrupted at the end of
  // the file.
  std::int64_t read(iovec* parts, int count, std::int64_t offset, bool wait);
  // Throws Code::corrupted unless `data`, the bytes of `sample`, are what its checksum says.
  void check(std::int64_t sample, const Extent& extent, const void* data) const;
  void compare(std::int64_t sample, const Extent& extent, std::uint32_t found) const;
  // Throws Code::corrupted if the file is shorter now than when it was opened.
  void check_size() const;
  [[noreturn]] void ends_at(std::int64_t offset) const;

  // Negative: no direct reads of this file.
  int direct();
  void refuse_direct() { refused_ = true; }
  // Whether a range is in the page cache, if the kernel tells this user; if not, the answer is yes.
  bool resident(std::int64_t offset, std::int64_t bytes);
  // A read found less than was wanted in the page cache, although, if `asked`, resident() said yes.
  void missed(bool asked);
  // Made at the first call; throws what throw_errno does.
  const std::shared_ptr<const MappedFile>& mapping();
  // None where there is no room in the address space.
  const MappedFile* try_mapping();
  long waits() const { return calls_.waits(); }
  // Whether the file lies on another machine, or behind a program: its pages may go without a word, also for good.
  bool elsewhere();

  // What the last look at the page cache found.
  enum class Seen : std::uint8_t {
    nothing,
    gaps,   // ask first, since a read that finds nothing has the kernel fetch it into the cache
    whole,  // a batch of many samples was there: small ones can be copied from the mapping
  };
  std::atomic<Seen> seen = Seen::nothing;
  // The kernel does not tell this user what is in the cache: its answer was wrong several times and never no. One
  // that tells may be wrong when a page goes between answer and read.
  std::atomic<bool> blind = false;

 private:
  const RecordFile& file_;
  const Calls& calls_;
  std::atomic<bool> told_no_ = false;
  std::atomic<int> wrong_ = 0;
  std::atomic<bool> waits_ = false;  // its file system knows no reads that do not wait
  std::atomic<bool> refused_ = false;
  std::atomic<int> elsewhere_ = -1;  // unknown
  std::atomic<int> direct_ = -1;
  std::atomic<const std::shared_ptr<const MappedFile>*> mapping_ = nullptr;
};

}  // namespace ff::ffrecord
