#include "ffrecord/record_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <memory>

#include "base/crc32.hpp"
#include "base/error.hpp"

namespace ff::ffrecord {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

constexpr std::int64_t kHeader = 12;    // u32 checksum of the metadata, i64 number of samples
constexpr std::int64_t kPerSample = 12;  // u32 checksum, i64 offset
constexpr std::size_t kBlock = std::size_t{1} << 20;

// O_NONBLOCK has no effect on a regular file; it keeps a FIFO from blocking the caller for ever.
int open_file(const std::string& path) {
  int fd;
  do {
    fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  } while (fd < 0 && errno == EINTR);
  if (fd < 0) throw_errno("cannot open record file '" + path + "'");
  return fd;
}

std::string hex(std::uint32_t value) {
  char text[16];
  std::snprintf(text, sizeof text, "%08x", value);
  return text;
}

}  // namespace

Descriptor::~Descriptor() {
  if (fd_ >= 0) ::close(fd_);
}

RecordFile::RecordFile(std::string path) : path_(std::move(path)), fd_(open_file(path_)) {
  struct stat status;
  if (::fstat(fd_.get(), &status) != 0) throw_errno("cannot stat record file '" + path_ + "'");
  if (!S_ISREG(status.st_mode))
    throw Error(Code::storage, "cannot read records from '" + path_ + "': it is not a regular file");
  load_index(status.st_size);
}

void RecordFile::corrupted(const std::string& what) const {
  throw Error(Code::corrupted, "record file '" + path_ + "' is damaged: " + what +
                                   "; write it again or restore it from a copy");
}

void RecordFile::load_index(std::int64_t size) {
  if (size < kHeader) corrupted(std::to_string(size) + " bytes are too few for a header");
  unsigned char header[kHeader];
  iovec head{header, kHeader};
  read(&head, 1, 0);
  std::uint32_t stored;
  std::int64_t n;
  std::memcpy(&stored, header, 4);
  std::memcpy(&n, header + 4, 8);
  if (n < 0 || n > (size - kHeader) / kPerSample)
    corrupted("its header claims " + std::to_string(n) + " samples, its " + std::to_string(size) +
              " bytes cannot hold their index");
  if (stored == 0 && n == 0) corrupted("its header is empty, as a writer that died leaves it");

  checksums_.resize(n);
  offsets_.resize(n + 1);
  iovec index[2] = {{checksums_.data(), static_cast<std::size_t>(n) * 4},
                    {offsets_.data(), static_cast<std::size_t>(n) * 8}};
  read(index, 2, kHeader);
  std::uint32_t found = crc32(0, header + 4, 8);
  found = crc32(found, checksums_.data(), static_cast<std::size_t>(n) * 4);
  found = crc32(found, offsets_.data(), static_cast<std::size_t>(n) * 8);
  metadata_checked_ = stored != 0 || found == 0;
  if (metadata_checked_ && stored != found)
    corrupted("its metadata has checksum " + hex(found) + ", its header says " + hex(stored));

  offsets_[n] = size;
  const std::int64_t first = kHeader + kPerSample * n;
  if (offsets_[0] != first)
    corrupted("its samples start at byte " + std::to_string(offsets_[0]) + " instead of " +
              std::to_string(first));
  const auto wrong = std::is_sorted_until(offsets_.begin(), offsets_.end());
  if (wrong != offsets_.end()) {
    const auto i = wrong - offsets_.begin();
    corrupted("sample " + std::to_string(i - 1) + " starts at byte " + std::to_string(offsets_[i - 1]) +
              ", after its end at " + std::to_string(offsets_[i]) +
              (i == n ? ", the end of the file" : ""));
  }
}

void RecordFile::read(iovec* parts, int count, std::int64_t offset) const {
  for (;;) {
    while (count > 0 && parts->iov_len == 0) ++parts, --count;
    if (count == 0) return;
    const ssize_t got = ::preadv(fd_.get(), parts, count, offset);
    if (got < 0) {
      if (errno == EINTR) continue;
      throw_errno("cannot read record file '" + path_ + "' at byte " + std::to_string(offset));
    }
    if (got == 0) corrupted("it ends at byte " + std::to_string(offset) + ", shorter than when it was opened");
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

void RecordFile::compare(std::int64_t i, std::uint32_t found) const {
  if (found != checksums_[i])
    corrupted("sample " + std::to_string(i) + " (" + std::to_string(length(i)) + " bytes at byte " +
              std::to_string(offsets_[i]) + ") has checksum " + hex(found) + ", the index says " +
              hex(checksums_[i]));
}

void RecordFile::check(std::int64_t i, const void* data) const {
  compare(i, crc32(0, data, static_cast<std::size_t>(length(i))));
}

void RecordFile::check_all() const {
  const auto buffer = std::make_unique_for_overwrite<unsigned char[]>(kBlock);
  std::int64_t position = offsets_[0];
  std::int64_t block_end = position;
  const unsigned char* next = buffer.get();
  for (std::int64_t i = 0; i < count(); ++i) {
    std::uint32_t found = 0;
    while (position < offsets_[i + 1]) {
      if (position == block_end) {
        const auto size = std::min<std::int64_t>(kBlock, offsets_[count()] - position);
        iovec part{buffer.get(), static_cast<std::size_t>(size)};
        read(&part, 1, position);
        next = buffer.get();
        block_end = position + size;
      }
      const std::int64_t step = std::min(offsets_[i + 1], block_end) - position;
      found = crc32(found, next, static_cast<std::size_t>(step));
      next += step;
      position += step;
    }
    compare(i, found);
  }
}

}  // namespace ff::ffrecord
