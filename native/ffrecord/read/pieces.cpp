#include "ffrecord/read/pieces.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <numeric>
#include <optional>
#include <tuple>

#include "base/crc/crc32.hpp"
#include "base/process/worker_pool.hpp"
#include "ffrecord/format/record_file.hpp"
#include "ffrecord/read/fetch.hpp"

namespace ff::ffrecord {
namespace {

constexpr std::int64_t kCut = std::int64_t{128} << 10;  // bytes that a thread takes at a time
constexpr std::int64_t kMarkedFor = 10;  // seconds; a file marked as used more recently is not marked again
constexpr unsigned kCheckThreads = 4;

// Opens a chunk file if it exists; returns a negative error number otherwise.
int open_chunk(int directory, const std::string& name) {
  int fd;
  do {
    fd = ::openat(directory, name.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  } while (fd < 0 && errno == EINTR);
  return fd < 0 ? -errno : fd;
}

void mark_used(int fd) {
  struct stat status;
  struct timespec now;
  ::clock_gettime(CLOCK_REALTIME_COARSE, &now);
  if (::fstat(fd, &status) == 0 && now.tv_sec - status.st_mtim.tv_sec >= kMarkedFor) ::futimens(fd, nullptr);
}

// Returns 0 if all of the piece was read, 1 if the file is too short, else a negative error number.
int read_piece(int fd, const ChunkPiece& piece, std::uint8_t* target) {
  for (std::int64_t at = 0; at < piece.bytes;) {
    const ssize_t got = ::pread(fd, target + at, static_cast<std::size_t>(piece.bytes - at), piece.first + at);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return got < 0 ? -errno : 1;
    at += got;
  }
  return 0;
}

// Cuts a sequence into ranges of about kCut bytes. Range i of the result `cuts` is [cuts[i], cuts[i + 1]).
template <typename Size>
std::vector<std::size_t> cut(std::size_t count, Size size) {
  std::vector<std::size_t> cuts = {0};
  std::int64_t filled = 0;
  for (std::size_t i = 0; i < count; ++i) {
    filled += size(i);
    if (filled < kCut && i + 1 < count) continue;
    cuts.push_back(i + 1);
    filled = 0;
  }
  return cuts;
}

}  // namespace

std::string chunk_name(const std::string& key, std::int64_t chunk) {
  char number[32];
  std::snprintf(number, sizeof number, "-%012lld.chunk", static_cast<long long>(chunk));
  return key.substr(0, 2) + "/" + key + number;
}

PiecesRead read_pieces(const std::string& directory, const std::vector<std::string>& keys,
                       const std::vector<ChunkPiece>& pieces, std::uint8_t* arena) {
  PiecesRead result;
  result.found.resize(pieces.size());
  const Descriptor root(::open(directory.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (root.get() < 0) {
    result.error = errno;
    return result;
  }
  std::vector<std::size_t> order(pieces.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    const auto place = [&](std::size_t i) { return std::tie(pieces[i].key, pieces[i].chunk, pieces[i].first); };
    return place(a) < place(b);
  });
  std::atomic<int> error = 0;
  const auto read_range = [&](std::size_t first, std::size_t last) {
    std::optional<Descriptor> file;
    const ChunkPiece* previous = nullptr;
    for (std::size_t i = first; i < last; ++i) {
      const ChunkPiece& piece = pieces[order[i]];
      if (previous == nullptr || previous->key != piece.key || previous->chunk != piece.chunk) {
        const auto key = static_cast<std::size_t>(piece.key);
        const int fd = open_chunk(root.get(), chunk_name(keys[key], piece.chunk));
        file.emplace(std::max(fd, -1));
        if (fd >= 0) mark_used(fd);
        else if (fd != -ENOENT) error = -fd;
      }
      previous = &piece;
      if (file->get() < 0) continue;
      const int got = read_piece(file->get(), piece, arena + piece.target);
      if (got < 0) error = -got;
      result.found[order[i]] = got == 0;
    }
  };
  const std::vector<std::size_t> cuts = cut(order.size(), [&](std::size_t i) { return pieces[order[i]].bytes; });
  const unsigned threads = cuts.size() > static_cast<std::size_t>(kShareBytes / kCut) ? worker_pool::kMost : 1;
  worker_pool::share(threads, cuts.size() - 1, [&](std::size_t i) { read_range(cuts[i], cuts[i + 1]); });
  result.error = error;
  return result;
}

std::vector<std::uint8_t> check_samples(const std::uint8_t* arena, const std::int64_t* offsets,
                                        const std::uint32_t* crcs, std::size_t count) {
  std::vector<std::uint8_t> right(count);
  const auto bytes = [&](std::size_t i) { return offsets[i + 1] - offsets[i]; };
  const std::vector<std::size_t> cuts = cut(count, bytes);
  const unsigned threads =
      cuts.size() > static_cast<std::size_t>(kShareBytes / kCut) ? std::min(worker_pool::cores(), kCheckThreads) : 1;
  worker_pool::share(threads, cuts.size() - 1, [&](std::size_t part) {
    for (std::size_t i = cuts[part]; i < cuts[part + 1]; ++i)
      right[i] = crc32(0, arena + offsets[i], static_cast<std::size_t>(bytes(i))) == crcs[i];
  });
  return right;
}

}  // namespace ff::ffrecord
