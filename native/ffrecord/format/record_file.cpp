#include "ffrecord/format/record_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdio>

#include "base/crc/crc32.hpp"
#include "base/error.hpp"
#include "ffrecord/format/v1_file.hpp"
#include "ffrecord/format/v2_file.hpp"

namespace ff::ffrecord {
namespace {

static_assert(std::endian::native == std::endian::little, "the formats are little-endian");

constexpr std::int64_t kBlock = std::int64_t{1} << 20;

// O_NONBLOCK has no effect on a regular file; it keeps a FIFO from blocking the caller for ever.
int open_file(const std::string& path) {
  int fd;
  do {
    fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  } while (fd < 0 && errno == EINTR);
  if (fd < 0) throw_errno("cannot open record file '" + path + "'");
  return fd;
}

// Returns whether the file begins with the magic of v2; false for a shorter file.
bool is_v2(int fd, const std::string& path) {
  char start[sizeof kMagic];
  ssize_t got;
  do {
    got = ::pread(fd, start, sizeof start, 0);
  } while (got < 0 && errno == EINTR);
  if (got < 0) throw_errno("cannot read record file '" + path + "'");
  return got == sizeof start && std::memcmp(start, kMagic, sizeof start) == 0;
}

}  // namespace

std::string hex(std::uint32_t value) {
  char text[16];
  std::snprintf(text, sizeof text, "%08x", value);
  return text;
}

Descriptor::~Descriptor() {
  if (fd_ >= 0) ::close(fd_);
}

Mapping::~Mapping() {
  if (data_ != nullptr) ::munmap(data_, static_cast<std::size_t>(bytes_));
}

void Mapping::map(int fd, std::int64_t bytes, const std::string& path) {
  void* const data = ::mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) throw_errno("cannot map the index of record file '" + path + "'");
  data_ = static_cast<unsigned char*>(data);
  bytes_ = bytes;
}

std::unique_ptr<RecordFile> RecordFile::open(std::string path) {
  Descriptor fd(open_file(path));
  struct stat status;
  if (::fstat(fd.get(), &status) != 0) throw_errno("cannot stat record file '" + path + "'");
  if (!S_ISREG(status.st_mode))
    throw Error(Code::storage, "cannot read records from '" + path + "': it is not a regular file");
  if (is_v2(fd.get(), path)) return std::make_unique<V2File>(std::move(path), fd.release());
  return std::make_unique<V1File>(std::move(path), fd.release());
}

void damaged(const std::string& name, const std::string& what) {
  throw Error(Code::corrupted,
              "record file '" + name + "' is damaged: " + what + "; write it again or restore it from a copy");
}

void RecordFile::ends_at(std::int64_t offset) const {
  corrupted("it ends at byte " + std::to_string(offset) + ", shorter than when it was opened");
}

std::int64_t RecordFile::file_size() const {
  struct stat status;
  if (::fstat(fd(), &status) != 0) throw_errno("cannot stat record file '" + path_ + "'");
  return status.st_size;
}

void RecordFile::check_mapped() const {
  const std::int64_t now = file_size();
  if (now < mapping_.bytes()) ends_at(now);
}

void RecordFile::read(iovec* parts, int count, std::int64_t offset) const {
  for (;;) {
    while (count > 0 && parts->iov_len == 0) ++parts, --count;
    if (count == 0) return;
    const ssize_t got = ::preadv(fd(), parts, count, offset);
    if (got < 0) {
      if (errno == EINTR) continue;
      throw_errno("cannot read record file '" + path_ + "' at byte " + std::to_string(offset));
    }
    if (got == 0) ends_at(offset);
    offset += got;
    for (auto left = static_cast<std::size_t>(got); left > 0;) {
      const std::size_t step = std::min(left, parts->iov_len);
      parts->iov_base = static_cast<char*>(parts->iov_base) + step;
      parts->iov_len -= step;
      left -= step;
      if (parts->iov_len == 0) ++parts, --count;
    }
  }
}

void RecordFile::read(void* data, std::size_t size, std::int64_t offset) const {
  iovec part{data, size};
  read(&part, 1, offset);
}

void RecordFile::compare(std::int64_t i, const Extent& extent, std::uint32_t found) const {
  if (found != extent.crc)
    corrupted("sample " + std::to_string(i) + " (" + std::to_string(extent.bytes) + " bytes at byte " +
              std::to_string(extent.offset) + ") has checksum " + hex(found) + ", the index says " + hex(extent.crc));
}

void RecordFile::check_all() const {
  check_mapped();
  const auto buffer = std::make_unique_for_overwrite<unsigned char[]>(kBlock);
  std::int64_t start = 0;  // the buffer holds the bytes [start, stop) of the file
  std::int64_t stop = 0;
  for (std::int64_t i = 0; i < count(); ++i) {
    const Extent extent = at(i);
    std::uint32_t found = 0;
    const std::int64_t end = extent.offset + extent.bytes;
    for (std::int64_t position = extent.offset; position < end;) {
      if (position < start || position >= stop) {
        start = position;
        stop = std::min(position + kBlock, size_);
        read(buffer.get(), static_cast<std::size_t>(stop - start), start);
      }
      const std::int64_t step = std::min(end, stop) - position;
      found = crc32(found, buffer.get() + (position - start), static_cast<std::size_t>(step));
      position += step;
    }
    compare(i, extent, found);
  }
}

}  // namespace ff::ffrecord
