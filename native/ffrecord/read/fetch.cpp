#include "ffrecord/read/fetch.hpp"

#include <limits.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <functional>

#include "base/crc/crc32.hpp"
#include "base/process/worker_pool.hpp"

namespace ff::ffrecord {
namespace {

// Maximum number of bytes of one read. The limit keeps the bytes in the core's cache until their checksum is computed.
constexpr std::int64_t kRunBytes = std::int64_t{512} << 10;
constexpr int kRunParts = 256;
static_assert(kRunParts <= IOV_MAX);
constexpr std::int64_t kGapBytes = 4096;  // maximum number of bytes between two samples of one read
constexpr unsigned kCopyThreads = 4;
constexpr std::int64_t kShare = std::int64_t{256} << 10;  // bytes per thread, when copying
constexpr std::int64_t kMapped = 4096;  // samples of up to this many bytes are copied from the mapping
constexpr std::size_t kMany = 32;       // samples copied between two checks for waits on the disk
constexpr std::int64_t kWaitShare = std::int64_t{64} << 10;  // bytes per thread, when waiting

// Calls `part` with ranges [first, last) of the pieces, of about `bytes` each, on up to `threads` threads.
void spread(const Job& job, unsigned threads, std::int64_t bytes,
            const std::function<void(std::size_t first, std::size_t last)>& part) {
  if (threads <= 1) return part(0, job.pieces.size());
  std::vector<std::size_t> cuts = {0};
  std::int64_t filled = 0;
  for (std::size_t i = 0; i < job.pieces.size(); ++i) {
    if (!job.pieces[i].done) filled += job.pieces[i].at.bytes;
    if (filled < bytes && i + 1 < job.pieces.size()) continue;
    cuts.push_back(i + 1);
    filled = 0;
  }
  worker_pool::share(threads, cuts.size() - 1, [&](std::size_t i) { part(cuts[i], cuts[i + 1]); });
}

unsigned copy_threads(const Job& job) {
  if (job.bytes <= kShareBytes) return 1;
  return job.threads != 0 ? job.threads : std::min(worker_pool::cores(), kCopyThreads);
}

// Reads a sample larger than a run in steps, with its checksum.
bool read_large(const Job& job, Piece& piece, bool wait) {
  std::uint32_t found = 0;
  for (std::int64_t at = 0; at < piece.at.bytes;) {
    const std::int64_t step = std::min(kRunBytes, piece.at.bytes - at);
    iovec part{piece.target + at, static_cast<std::size_t>(step)};
    if (piece.source->read(&part, 1, piece.at.offset + at, wait) < step) return false;
    if (job.check) found = crc32(found, piece.target + at, static_cast<std::size_t>(step));
    at += step;
  }
  if (job.check) piece.source->compare(piece.sample, piece.at, found);
  piece.done = true;
  return true;
}

// Reads pieces[at] and the adjacent pieces after it (alignment gaps may separate them). Returns the index after them.
std::size_t read_run(Job& job, std::size_t at, std::size_t last, bool wait, std::size_t& missing) {
  Piece& first = job.pieces[at];
  Source& source = *first.source;
  std::array<iovec, kRunParts> parts;
  std::array<std::uint8_t, kGapBytes> gap;  // bytes between two samples are read and dropped
  int used = 0;
  std::int64_t bytes = 0;
  std::size_t stop = at;
  for (; stop < last && used + 1 < kRunParts; ++stop) {
    const Piece& piece = job.pieces[stop];
    const std::int64_t skip = piece.at.offset - (first.at.offset + bytes);
    if (stop > at) {
      const bool next = piece.source == &source && piece.sample == job.pieces[stop - 1].sample + 1;
      if (!next || skip < 0 || skip > kGapBytes || piece.done || bytes + skip + piece.at.bytes > kRunBytes) break;
    }
    if (skip > 0) parts[used++] = {gap.data(), static_cast<std::size_t>(skip)};
    const auto length = static_cast<std::size_t>(piece.at.bytes);
    if (used > 0 && static_cast<std::uint8_t*>(parts[used - 1].iov_base) + parts[used - 1].iov_len == piece.target) {
      parts[used - 1].iov_len += length;
    } else {
      parts[used++] = {piece.target, length};
    }
    bytes += skip + piece.at.bytes;
  }
  const bool asked = !wait && source.seen.load(std::memory_order_relaxed) == Source::Seen::gaps &&
                     !source.blind.load(std::memory_order_relaxed);
  if (asked && !source.resident(first.at.offset, bytes)) {
    missing += stop - at;
    return stop;
  }
  if (bytes > kRunBytes) {  // only a run of a single piece can be that large
    if (!read_large(job, first, wait)) ++missing;
  } else {
    const std::int64_t got = source.read(parts.data(), used, first.at.offset, wait);
    for (std::size_t i = at; i < stop; ++i) {
      Piece& piece = job.pieces[i];
      piece.done = piece.end() <= first.at.offset + got;
      if (!piece.done) ++missing;
      if (piece.done && job.check) source.check(piece.sample, piece.at, piece.target);
    }
  }
  if (!wait && !job.pieces[stop - 1].done) source.missed(asked);
  return stop;
}

std::size_t read_range(Job& job, std::size_t first, std::size_t last, bool wait) {
  std::size_t missing = 0;
  for (std::size_t at = first; at < last;) {
    at = job.pieces[at].done ? at + 1 : read_run(job, at, last, wait, missing);
  }
  return missing;
}

void check_sizes(const Job& job) {
  const Source* checked = nullptr;
  for (const Piece& piece : job.pieces) {
    if (piece.source != checked) piece.source->check_size();
    checked = piece.source;
  }
}

void verify(const Piece& piece, const MappedFile& mapping, const std::uint8_t* data) {
  if (mapping.verified(piece.sample)) return;
  piece.source->check(piece.sample, piece.at, data);
  mapping.set_verified(piece.sample);
}

// Prefetches the first lines of a later piece, because small pieces end before the processor detects a pattern.
void touch_ahead(const Job& job, std::size_t i, std::size_t last) {
  constexpr std::size_t kAhead = 4;
  constexpr std::int64_t kLine = 64;
  if (i + kAhead >= last) return;
  const Piece& piece = job.pieces[i + kAhead];
  const std::uint8_t* const at = piece.source->try_mapping()->data() + piece.at.offset;
  for (std::int64_t line = 0; line < std::min(piece.at.bytes, 8 * kLine); line += kLine) __builtin_prefetch(at + line);
}

// Copies small samples from the mapping without a system call for each, if all were in the page cache at the last
// check. If a page was evicted since, waits for that page and leaves the remaining samples. Returns whether it waited.
bool copy_whole(Job& job) {
  if (job.pieces.size() < kMany || job.bytes > kMapped * static_cast<std::int64_t>(job.pieces.size())) return false;
  const Source* known = nullptr;
  for (const Piece& piece : job.pieces) {
    if (piece.source == known) continue;
    if (piece.source->seen.load(std::memory_order_relaxed) != Source::Seen::whole) return false;
    if (piece.source->remote() || piece.source->try_mapping() == nullptr) return false;
    known = piece.source;
  }
  check_sizes(job);
  std::atomic<bool> waited = false;
  spread(job, copy_threads(job), kShare, [&](std::size_t first, std::size_t last) {
    const long before = job.pieces[first].source->waits();
    for (std::size_t i = first; i < last; ++i) {
      Piece& piece = job.pieces[i];
      touch_ahead(job, i, last);
      std::memcpy(piece.target, piece.source->try_mapping()->data() + piece.at.offset,
                  static_cast<std::size_t>(piece.at.bytes));
      if (job.check) piece.source->check(piece.sample, piece.at, piece.target);
      piece.done = true;
      if ((i + 1 - first) % kMany != 0 && i + 1 < last) continue;
      if (piece.source->waits() == before) continue;
      piece.source->missed(false);
      waited = true;
      return;
    }
  });
  return waited;
}

}  // namespace

std::size_t fetch_cached(Job& job) {
  const bool waited = copy_whole(job);
  std::atomic<std::size_t> missing = 0;
  spread(job, copy_threads(job), kShare,
         [&](std::size_t first, std::size_t last) { missing += read_range(job, first, last, false); });
  if (missing > 0 || waited) return missing;
  const auto seen = job.pieces.size() >= kMany ? Source::Seen::whole : Source::Seen::nothing;
  for (const Piece& piece : job.pieces) {
    const auto before = piece.source->seen.load(std::memory_order_relaxed);
    if (before == Source::Seen::gaps || before < seen) piece.source->seen = seen;
  }
  return 0;
}

void fetch_waiting(Job& job) {
  const unsigned threads = job.threads != 0 ? job.threads : worker_pool::kMost;
  spread(job, threads, kWaitShare, [&](std::size_t first, std::size_t last) { read_range(job, first, last, true); });
}

void fetch_buffered(Job& job) {
  spread(job, copy_threads(job), kShare,
         [&](std::size_t first, std::size_t last) { read_range(job, first, last, true); });
}

void fetch_mapped(Job& job) {
  check_sizes(job);
  spread(job, copy_threads(job), kShare, [&job](std::size_t first, std::size_t last) {
    for (std::size_t i = first; i < last; ++i) {
      Piece& piece = job.pieces[i];
      const MappedFile& mapping = *piece.source->mapping();
      std::memcpy(piece.target, mapping.data() + piece.at.offset, static_cast<std::size_t>(piece.at.bytes));
      if (job.check) verify(piece, mapping, piece.target);
      piece.done = true;
    }
  });
}

void verify_mapped(Job& job) {
  check_sizes(job);
  if (!job.check) return;
  std::erase_if(job.pieces, [](const Piece& piece) { return piece.source->mapping()->verified(piece.sample); });
  job.bytes = 0;
  for (const Piece& piece : job.pieces) job.bytes += piece.at.bytes;
  spread(job, copy_threads(job), kShare, [&job](std::size_t first, std::size_t last) {
    for (std::size_t i = first; i < last; ++i) {
      const Piece& piece = job.pieces[i];
      const MappedFile& mapping = *piece.source->mapping();
      verify(piece, mapping, mapping.data() + piece.at.offset);
    }
  });
}

}  // namespace ff::ffrecord
