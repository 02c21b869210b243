// Every segment arrives, for any place, neighbours, cache state, queue and queue faults. A flipped byte, a truncated
// file and a missing file are reported with the segment's number.
#include "storage/checked_read.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "base/crc/crc32.hpp"
#include "base/io/thread_queue.hpp"
#include "base/testing/check.hpp"
#include "storage/scenes.hpp"
#include "storage/segment_file.hpp"

namespace {

using ff::storage::kMostSegment;
using ff::storage::MakeQueue;
using ff::storage::ReadOptions;
using ff::storage::Segment;
using ff::storage::SegmentError;
using ff::storage::TemporaryFile;

constexpr std::size_t kSize = (std::size_t{FF_THREAD_SANITIZER ? 6 : 20} << 20) + 77;

std::unique_ptr<ff::IoQueue> threads(unsigned entries) { return ff::thread_queue::make(entries, 3); }
std::unique_ptr<ff::IoQueue> rough(unsigned entries) {
  return std::make_unique<ff::storage::RoughQueue>(entries, 0, 0);
}
void write_file(const TemporaryFile& file, const std::vector<char>& bytes) {
  CHECK(::pwrite(file.fd(), bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
  CHECK(::fsync(file.fd()) == 0);
}

void forget(const TemporaryFile& file) { CHECK(::posix_fadvise(file.fd(), 0, 0, POSIX_FADV_DONTNEED) == 0); }

// Segments in any order: large, tiny, empty, adjacent, far apart, overlapping, up to the last byte.
struct Wanted {
  std::vector<Segment> segments;
  std::vector<std::vector<char>> targets;

  Wanted(const std::vector<char>& bytes, unsigned seed) {
    std::mt19937 random(seed);
    for (std::size_t at = 0; at < bytes.size();) {
      const std::size_t most = random() % 2 == 0 ? 200 : static_cast<std::size_t>(kMostSegment) + 1;
      const std::size_t size = std::min(bytes.size() - at, random() % most);
      add(bytes, at, size);
      at += size + (random() % 4 == 0 ? random() % 100000 : 0);
      if (random() % 8 == 0) at -= std::min(at, std::size_t{1000});
    }
    add(bytes, bytes.size() - 1, 1);
    add(bytes, 0, static_cast<std::size_t>(kMostSegment));
    std::shuffle(segments.begin(), segments.end(), random);
  }
  void add(const std::vector<char>& bytes, std::size_t at, std::size_t size) {
    const std::uint32_t crc = ff::crc32(0, bytes.data() + at, size);
    char* const target = targets.emplace_back(size + 1).data() + 1;
    segments.push_back({0, static_cast<std::int64_t>(at), static_cast<std::int64_t>(size), target, crc});
  }
  bool arrived(const std::vector<char>& bytes) const {
    for (const Segment& segment : segments) {
      if (std::memcmp(segment.target, bytes.data() + segment.offset, static_cast<std::size_t>(segment.bytes)) != 0)
        return false;
    }
    return true;
  }
};

void arrives(const TemporaryFile& file, const std::vector<char>& bytes) {
  unsigned seed = 0;
  for (const MakeQueue& make : {MakeQueue(ff::storage::make_queue), MakeQueue(threads), MakeQueue(rough)}) {
    for (const unsigned count : {0u, 1u, 4u}) {
      if (FF_THREAD_SANITIZER && count == 0) continue;  // 0 is as many threads as cores, too many here
      for (const bool direct : {true, false}) {
        for (const bool cold : {true, false}) {
          if (cold) forget(file);
          const Wanted wanted(bytes, ++seed);
          ff::storage::read_checked({file.path()}, wanted.segments, {.threads = count, .direct = direct, .make = make});
          CHECK(wanted.arrived(bytes));
        }
      }
    }
  }
}

// Returns the index of the segment that the error names, after a check of the error's code; -1 without an error.
int blamed(const std::vector<std::string>& paths, const std::vector<Segment>& segments, const ReadOptions& options,
           ff::Code code) {
  try {
    ff::storage::read_checked(paths, segments, options);
  } catch (const SegmentError& error) {
    CHECK(error.code() == code);
    return static_cast<int>(error.segment());
  }
  return -1;
}

std::vector<Segment> tiled(const std::vector<char>& bytes, std::size_t size, std::vector<char>& target) {
  target.assign(bytes.size(), 0);
  std::vector<Segment> segments;
  for (std::size_t at = 0; at < bytes.size(); at += size) {
    const std::size_t step = std::min(size, bytes.size() - at);
    segments.push_back({0, static_cast<std::int64_t>(at), static_cast<std::int64_t>(step), target.data() + at,
                        ff::crc32(0, bytes.data() + at, step)});
  }
  return segments;
}

// Segments of whole pages, to whose targets the disk may write directly, and a last one that is no multiple of a page.
void straight(const TemporaryFile& file, const std::vector<char>& bytes) {
  std::vector<char> memory(bytes.size() + 4096);
  char* const begin = memory.data() + (4096 - reinterpret_cast<std::uintptr_t>(memory.data()) % 4096) % 4096;
  for (const MakeQueue& make : {MakeQueue(ff::storage::make_queue), MakeQueue(threads), MakeQueue(rough)}) {
    const ReadOptions options{.threads = 2, .in_place = true, .make = make};
    for (const std::size_t skew : {std::size_t{0}, std::size_t{8}}) {
      std::fill(memory.begin(), memory.end(), 0);
      std::vector<Segment> segments;
      for (std::size_t at = 0; at < bytes.size() - skew; at += static_cast<std::size_t>(kMostSegment)) {
        const std::size_t step = std::min(bytes.size() - skew - at, static_cast<std::size_t>(kMostSegment));
        segments.push_back({0, static_cast<std::int64_t>(at), static_cast<std::int64_t>(step), begin + skew + at,
                            ff::crc32(0, bytes.data() + at, step)});
      }
      forget(file);
      ff::storage::read_checked({file.path()}, segments, options);
      CHECK(std::memcmp(begin + skew, bytes.data(), bytes.size() - skew) == 0);
      segments[1].crc ^= 1;
      forget(file);
      CHECK(blamed({file.path()}, segments, options, ff::Code::corrupted) == 1);
    }
  }
}

void damage(const TemporaryFile& file, const std::vector<char>& bytes) {
  constexpr std::size_t kTile = 1000003;
  std::vector<char> target;
  const auto segments = tiled(bytes, kTile, target);
  for (const bool cold : {true, false}) {
    for (const std::size_t at :
         {std::size_t{0}, std::size_t{4095}, kTile - 1, kTile, std::size_t{7} << 20, kSize - 1}) {
      const char flipped = static_cast<char>(bytes[at] ^ 0x40);
      CHECK(::pwrite(file.fd(), &flipped, 1, static_cast<off_t>(at)) == 1 && ::fsync(file.fd()) == 0);
      if (cold) forget(file);
      CHECK(blamed({file.path()}, segments, {}, ff::Code::corrupted) == static_cast<int>(at / kTile));
      CHECK(::pwrite(file.fd(), &bytes[at], 1, static_cast<off_t>(at)) == 1 && ::fsync(file.fd()) == 0);
    }
  }
  CHECK(blamed({file.path()}, segments, {}, ff::Code::corrupted) == -1);
}

void truncated(const char* directory, const std::vector<char>& bytes) {
  constexpr std::size_t kTile = 1000003;
  std::vector<char> target;
  const auto segments = tiled(bytes, kTile, target);
  for (const MakeQueue& make : {MakeQueue(ff::storage::make_queue), MakeQueue(threads), MakeQueue(rough)}) {
    for (const std::size_t size : {std::size_t{0}, std::size_t{4096}, kTile * 5, kTile * 9 + 1, kSize - 1}) {
      const TemporaryFile file(directory);
      write_file(file, {bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size)});
      forget(file);
      const int first = blamed({file.path()}, segments, {.threads = 1, .make = make}, ff::Code::corrupted);
      CHECK(first >= static_cast<int>(size / kTile));
      const std::vector<Segment> one(segments.begin() + static_cast<std::ptrdiff_t>(size / kTile),
                                     segments.begin() + static_cast<std::ptrdiff_t>(size / kTile) + 1);
      CHECK(blamed({file.path()}, one, {.make = make}, ff::Code::corrupted) == 0);
    }
  }
}

// A file in memory that is truncated while open gives an error, not a SIGBUS.
void cut_when_open(const std::vector<char>& bytes) {
  const TemporaryFile file("/dev/shm");
  write_file(file, bytes);
  std::vector<char> target(std::size_t{1} << 20);
  const Segment segment{0, (std::int64_t{2} << 20) + 5, 1 << 20, target.data(),
                        ff::crc32(0, bytes.data() + (2 << 20) + 5, target.size())};
  ff::storage::SegmentFile opened(file.path(), 0);
  const ff::storage::Job job{&segment, &opened, 0};
  std::uint32_t crc = 0;
  CHECK(opened.copy(job, crc) && crc == segment.crc);
  CHECK(std::memcmp(target.data(), bytes.data() + segment.offset, target.size()) == 0);
  CHECK(::ftruncate(file.fd(), 5 << 19) == 0);
  CHECK(!opened.copy(job, crc));
  CHECK(opened.read(job, 0, segment.bytes, true) == (1 << 19) - 5);
  try {
    opened.read(job, (1 << 19) - 5, 1, true);
    CHECK(false);
  } catch (const SegmentError& error) {
    CHECK(error.code() == ff::Code::corrupted);
  }
}

void errors(const TemporaryFile& file, const std::vector<char>& bytes) {
  std::vector<char> target;
  auto segments = tiled(bytes, 1 << 20, target);
  for (const int error : {EIO, EINVAL}) {  // EINVAL ends the read if a request without O_DIRECT is refused, too
    forget(file);
    const MakeQueue make = [&](unsigned entries) {
      return std::make_unique<ff::storage::RoughQueue>(entries, 2, error);
    };
    CHECK(blamed({file.path()}, segments, {.make = make}, ff::Code::storage) >= 0);
  }
  segments[4].file = 1;
  CHECK(blamed({file.path(), file.path() + "-absent"}, segments, {}, ff::Code::storage) == 4);
  for (const Segment& bad :
       {Segment{1, 0, 1, target.data(), 0}, Segment{0, -1, 1, target.data(), 0}, Segment{0, 0, -1, target.data(), 0},
        Segment{0, 0, kMostSegment + 1, target.data(), 0}, Segment{0, 0, 1, nullptr, 0}}) {
    try {
      ff::storage::read_checked({file.path()}, {bad});
      CHECK(false);
    } catch (const ff::Error& error) {
      CHECK(error.code() == ff::Code::invalid);
    }
  }
  ff::storage::read_checked({}, {});
}

// Segments across the offsets 2, 4 and 6 GiB, in a mostly sparse file.
void far(const char* directory) {
  const TemporaryFile file(directory);
  std::vector<Segment> segments;
  const auto bytes = ff::storage::random_bytes(100000, 9);
  std::vector<char> target(bytes.size() * 3);
  for (std::size_t i = 0; i < 3; ++i) {
    const auto at = static_cast<std::int64_t>(((i + 1) << 31) - 777);
    CHECK(::pwrite(file.fd(), bytes.data(), bytes.size(), at) == static_cast<ssize_t>(bytes.size()));
    segments.push_back({0, at, static_cast<std::int64_t>(bytes.size()), target.data() + i * bytes.size(),
                        ff::crc32(0, bytes.data(), bytes.size())});
  }
  CHECK(::fsync(file.fd()) == 0);
  for (const bool cold : {true, false}) {
    if (cold) forget(file);
    std::fill(target.begin(), target.end(), 0);
    ff::storage::read_checked({file.path()}, segments);
    for (std::size_t i = 0; i < 3; ++i) CHECK(std::memcmp(&target[i * bytes.size()], bytes.data(), bytes.size()) == 0);
  }
}

}  // namespace

int main() {
  const auto bytes = ff::storage::random_bytes(kSize, 2);
  for (const char* const directory : {"/var/tmp", "/dev/shm"}) {
    const TemporaryFile file(directory);
    write_file(file, bytes);
    arrives(file, bytes);
    straight(file, bytes);
    if (!FF_THREAD_SANITIZER) {  // these tests use the same threads as those above, on other data
      damage(file, bytes);
      truncated(directory, bytes);
      far(directory);
    }
  }
  const TemporaryFile file;
  write_file(file, bytes);
  errors(file, bytes);
  cut_when_open(bytes);
  return 0;
}
