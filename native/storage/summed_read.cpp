#include "storage/summed_read.hpp"

#include <fcntl.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <string>
#include <system_error>

#include "base/crc/crc32c.hpp"
#include "base/error.hpp"

namespace ff::storage {

namespace {

constexpr std::int64_t kPiece = std::int64_t{256} << 10;

class Descriptor {
 public:
  explicit Descriptor(const std::string& path) : fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

[[noreturn]] void fail_reading(const std::string& path) {
  throw Error(Code::storage, "cannot read " + path + ": " + std::generic_category().message(errno));
}

}  // namespace

std::uint32_t read_summed(const std::string& path, std::int64_t offset, std::int64_t bytes, char* target,
                          std::uint32_t start) {
  const Descriptor file(path);
  if (file.get() < 0) fail_reading(path);
  // Hint: a cold range is fetched as a whole, ahead of the pieces.
  static_cast<void>(::posix_fadvise(file.get(), offset, bytes, POSIX_FADV_WILLNEED));
  std::uint32_t crc = start;
  for (std::int64_t at = 0; at < bytes;) {
    const auto most = static_cast<std::size_t>(std::min(kPiece, bytes - at));
    const ssize_t got = ::pread(file.get(), target + at, most, offset + at);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail_reading(path);
    if (got == 0)
      throw Error(Code::corrupted, path + " ends at byte " + std::to_string(offset + at) + ", inside a needed range");
    crc = crc32c(crc, target + at, static_cast<std::size_t>(got));
    at += got;
  }
  return crc;
}

}  // namespace ff::storage
