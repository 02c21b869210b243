#include "storage/summed_read.hpp"

#include <fcntl.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <deque>
#include <string>
#include <system_error>

#include "base/crc/crc32c.hpp"
#include "base/error.hpp"
#include "base/process/worker_pool.hpp"

namespace ff::storage {

namespace {

constexpr std::int64_t kPiece = std::int64_t{256} << 10;
constexpr std::int64_t kInline = std::int64_t{1} << 20;  // maximum bytes of a call that the calling thread reads alone
constexpr unsigned kReaders = 4;  // number of threads, even on fewer cores: a disk needs several requests in flight

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

std::uint32_t read_one(const std::string& path, int file, const SummedRange& range) {
  std::uint32_t crc = range.start;
  for (std::int64_t at = 0; at < range.bytes;) {
    const auto most = static_cast<std::size_t>(std::min(kPiece, range.bytes - at));
    const ssize_t got = ::pread(file, range.target + at, most, range.offset + at);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail_reading(path);
    if (got == 0)
      throw Error(Code::corrupted,
                  path + " ends at byte " + std::to_string(range.offset + at) + ", inside a needed range");
    crc = crc32c(crc, range.target + at, static_cast<std::size_t>(got));
    at += got;
  }
  return crc;
}

}  // namespace

std::vector<std::uint32_t> read_summed(const std::vector<std::string>& paths, const std::vector<SummedRange>& ranges) {
  std::deque<Descriptor> files;
  for (const std::string& path : paths) {
    if (files.emplace_back(path).get() < 0) fail_reading(path);
  }
  std::int64_t bytes = 0;
  for (const SummedRange& range : ranges) {
    if (range.file >= paths.size()) throw Error(Code::invalid, "invalid file " + std::to_string(range.file));
    bytes += range.bytes;
  }
  std::vector<std::uint32_t> crcs(ranges.size());
  worker_pool::share(bytes <= kInline ? 1 : kReaders, ranges.size(), [&](std::size_t n) {
    crcs[n] = read_one(paths[ranges[n].file], files[ranges[n].file].get(), ranges[n]);
  });
  return crcs;
}

}  // namespace ff::storage
