#include "storage/checked_read.hpp"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <numeric>

#include "base/crc/crc32.hpp"
#include "base/process/worker_pool.hpp"
#include "storage/direct_runs.hpp"
#include "storage/segment_file.hpp"

namespace ff::storage {
namespace {

constexpr std::int64_t kSlice = std::int64_t{256} << 10;
constexpr std::int64_t kFirstSlice = 4096;
constexpr unsigned kDirectThreads = 3;

void check_arguments(const std::vector<std::string>& paths, const std::vector<Segment>& segments) {
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const Segment& segment = segments[i];
    const bool good = segment.file < paths.size() && segment.offset >= 0 && segment.bytes >= 0 &&
                      segment.bytes <= kMostSegment && (segment.target != nullptr || segment.bytes == 0);
    if (!good)
      throw Error(Code::invalid, "segment " + std::to_string(i) + " (file " + std::to_string(segment.file) + ", byte " +
                                     std::to_string(segment.offset) + ", " + std::to_string(segment.bytes) +
                                     " bytes) cannot be read");
  }
}

// Jobs sorted by file and place, and their files. Threads share a plan and do not change it.
struct Plan {
  std::vector<Job> jobs;
  std::vector<std::unique_ptr<SegmentFile>> files;
};

Plan make_plan(const std::vector<std::string>& paths, const std::vector<Segment>& segments) {
  Plan plan;
  std::vector<std::size_t> order(segments.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&segments](std::size_t a, std::size_t b) {
    return std::pair(segments[a].file, segments[a].offset) < std::pair(segments[b].file, segments[b].offset);
  });
  plan.files.resize(paths.size());
  for (const std::size_t i : order) {
    auto& file = plan.files[segments[i].file];
    if (!file) file = std::make_unique<SegmentFile>(paths[segments[i].file], i);
    plan.jobs.push_back({&segments[i], file.get(), i});
  }
  return plan;
}

// Reads a segment and compares its CRC32. If `wait`, always returns true. Otherwise returns false if a part of the
// segment is not in the page cache.
bool read_cached(const Job& job, bool wait) {
  std::uint32_t crc = 0;
  if (job.file->copy(job, crc)) {
    job.compare(crc);
    return true;
  }
  for (std::int64_t at = 0; at < job.segment->bytes;) {
    // The first read is one page: if nothing is cached, the kernel would fetch the requested range in vain.
    const std::int64_t most = at == 0 && !wait ? kFirstSlice : kSlice;
    const std::int64_t got = job.file->read(job, at, std::min(most, job.segment->bytes - at), wait);
    if (got == 0) return false;
    crc = crc32(crc, job.segment->target + at, static_cast<std::size_t>(got));
    at += got;
  }
  job.compare(crc);
  return true;
}

}  // namespace

void read_checked(const std::vector<std::string>& paths, const std::vector<Segment>& segments,
                  const ReadOptions& options) {
  check_arguments(paths, segments);
  Plan plan = make_plan(paths, segments);
  const unsigned threads = std::min(options.threads != 0 ? options.threads : worker_pool::cores(), worker_pool::kMost);
  std::vector<char> missing(plan.jobs.size());
  worker_pool::share(threads, plan.jobs.size(), [&](std::size_t i) {
    const Job& job = plan.jobs[i];
    missing[i] = !read_cached(job, !options.direct);
  });
  std::vector<Job> rest;
  for (std::size_t i = 0; i < plan.jobs.size(); ++i) {
    if (missing[i] != 0) rest.push_back(plan.jobs[i]);
  }
  if (rest.empty()) return;
  const std::vector<Run> runs = runs_of(rest);
  std::atomic<std::size_t> next = 0;
  const auto readers = static_cast<unsigned>(std::min<std::size_t>({threads, kDirectThreads, runs.size()}));
  worker_pool::share(readers, readers, [&](std::size_t) { read_runs(rest, runs, next, kBlocks / readers, options); });
}

}  // namespace ff::storage
