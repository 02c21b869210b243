#include "storage/segment_file.hpp"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/crc/crc32.hpp"
#include "base/memory/stream_copy.hpp"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

namespace ff::storage {
namespace {

constexpr std::int64_t kPage = 4096;
constexpr std::int64_t kLeastCopied = std::int64_t{256} << 10;  // for smaller segments, read() is faster than copy()
constexpr std::int64_t kStep = std::int64_t{16} << 10;  // bytes that stay in the L1 cache between copy and checksum

}  // namespace

void Job::compare(std::uint32_t crc) const {
  if (crc == segment->crc) return;
  throw SegmentError(Code::corrupted,
                     file->path() + ": the CRC32 of bytes " + std::to_string(segment->offset) + " to " +
                         std::to_string(end()) + " does not match",
                     number);
}

void Job::fail(int error) const {
  const bool full = error == ENOMEM;
  throw SegmentError(
      full ? Code::no_space : Code::storage,
      "cannot read " + file->path() + " at byte " + std::to_string(segment->offset) + ": " + std::strerror(error),
      number);
}

void Job::ends_at(std::int64_t offset) const {
  throw SegmentError(Code::corrupted,
                     file->path() + " ends at byte " + std::to_string(offset) + ", inside a needed range", number);
}

SegmentFile::SegmentFile(const std::string& path, std::size_t segment)
    : path_(path), fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
  if (fd_ < 0) throw SegmentError(Code::storage, "cannot read " + path + ": " + std::strerror(errno), segment);
  // With this advice, a read that finds nothing in the page cache fetches one page instead of the readahead.
  ::posix_fadvise(fd_, 0, 0, POSIX_FADV_RANDOM);
  direct_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
  map();
}

// Maps only files on tmpfs: on other file systems an unreadable page raises SIGBUS instead of an error.
void SegmentFile::map() {
  struct statfs system{};
  struct stat status{};
  if (::fstatfs(fd_, &system) != 0 || system.f_type != TMPFS_MAGIC) return;
  if (::fstat(fd_, &status) != 0 || status.st_size < kLeastCopied) return;
  void* const at = ::mmap(nullptr, static_cast<std::size_t>(status.st_size), PROT_READ, MAP_SHARED, fd_, 0);
  if (at == MAP_FAILED) return;
  ::madvise(at, static_cast<std::size_t>(status.st_size), MADV_DONTFORK);
  mapped_ = static_cast<const char*>(at);
  size_ = status.st_size;
}

SegmentFile::~SegmentFile() {
  if (mapped_ != nullptr) ::munmap(const_cast<char*>(mapped_), static_cast<std::size_t>(size_));
  ::close(fd_);
  if (direct_ >= 0) ::close(direct_);
}

std::int64_t SegmentFile::read(const Job& job, std::int64_t at, std::int64_t most, bool wait) {
  const Segment& segment = *job.segment;
  const iovec part{segment.target + at, static_cast<std::size_t>(most)};
  for (;;) {
    const int flags = wait || waits_.load(std::memory_order_relaxed) ? 0 : RWF_NOWAIT;
    const ssize_t got = ::preadv2(fd_, &part, 1, segment.offset + at, flags);
    if (got > 0) return got;
    if (got == 0) job.ends_at(segment.offset + at);
    if (errno == EINTR) continue;
    if (flags != 0 && errno == EAGAIN) return 0;
    if (flags == 0 || (errno != EOPNOTSUPP && errno != ENOSYS)) job.fail(errno);
    waits_ = true;
  }
}

bool SegmentFile::copy(const Job& job, std::uint32_t& crc) const {
  const Segment& segment = *job.segment;
  if (mapped_ == nullptr || segment.bytes < kLeastCopied || job.end() > size_) return false;
  const std::int64_t first = segment.offset / kPage * kPage;
  char* const pages = const_cast<char*>(mapped_ + first);
  const auto bytes = static_cast<std::size_t>(job.end() - first);
  // Fails if the file became shorter, a hole cannot be filled or the kernel is older than 5.14.
  if (::madvise(pages, bytes, MADV_POPULATE_READ) != 0) return false;
  // Each step copies before it computes the checksum. The copy prefetches from several pages at once, the checksum from
  // one page at a time.
  const char* const from = mapped_ + segment.offset;
  crc = 0;
  for (std::int64_t at = 0; at < segment.bytes; at += kStep) {
    const auto step = static_cast<std::size_t>(std::min(kStep, segment.bytes - at));
    stream_copy(segment.target + at, from + at, step);
    crc = crc32(crc, from + at, step);
  }
  stream_fence();
  ::madvise(pages, bytes, MADV_DONTNEED);  // otherwise the process's resident memory would count all bytes read
  return true;
}

int SegmentFile::direct() { return direct_ < 0 || refused_.load(std::memory_order_relaxed) ? fd_ : direct_; }

}  // namespace ff::storage
