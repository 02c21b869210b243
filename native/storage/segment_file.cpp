#include "storage/segment_file.hpp"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace ff::storage {

void Job::compare(std::uint32_t crc) const {
  if (crc == segment->crc) return;
  throw SegmentError(Code::corrupted,
                     file->path() + ": the CRC32 of bytes " + std::to_string(segment->offset) + " to " +
                         std::to_string(end()) + " does not hold",
                     number);
}

void Job::fail(int error) const {
  const bool full = error == ENOMEM;
  throw SegmentError(full ? Code::no_space : Code::storage,
                     "cannot read " + file->path() + " at byte " + std::to_string(segment->offset) + ": " +
                         std::strerror(error),
                     number);
}

void Job::ends_at(std::int64_t offset) const {
  throw SegmentError(Code::corrupted,
                     file->path() + " ends at byte " + std::to_string(offset) + ", inside a needed range", number);
}

SegmentFile::SegmentFile(const std::string& path, std::size_t segment)
    : path_(path), fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
  if (fd_ < 0)
    throw SegmentError(Code::storage, "cannot read " + path + ": " + std::strerror(errno), segment);
  // What is read in vain is one page then and not the kernel's idea of what comes next.
  ::posix_fadvise(fd_, 0, 0, POSIX_FADV_RANDOM);
  direct_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
}

SegmentFile::~SegmentFile() {
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

int SegmentFile::direct() { return direct_ < 0 || refused_.load(std::memory_order_relaxed) ? fd_ : direct_; }

}  // namespace ff::storage
