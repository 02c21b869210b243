#include "storage/direct_runs.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <new>

#include "base/crc/crc32.hpp"

namespace ff::storage {
namespace {

constexpr std::int64_t kAlign = 4096;
constexpr std::int64_t kGap = std::int64_t{32} << 10;  // a gap of at most this many bytes is read, not skipped
constexpr std::int64_t kRequest = std::int64_t{1} << 20;
constexpr std::int64_t kSumStep = std::int64_t{256} << 10;  // bytes that stay in the core's cache until they are copied
constexpr std::size_t kBlock = static_cast<std::size_t>(kMostSegment + 2 * kAlign);
constexpr unsigned kParts = static_cast<unsigned>((kMostSegment + 2 * kAlign + kRequest - 1) / kRequest);

std::int64_t down(std::int64_t offset) { return offset / kAlign * kAlign; }
std::int64_t up(std::int64_t offset) { return down(offset + kAlign - 1); }

// Memory for reads. Not inherited by forked children, because copy-on-write could move a page
// away while the disk writes to it.
class Blocks {
 public:
  explicit Blocks(unsigned count) : bytes_(count * kBlock) {
    void* const at = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) throw std::bad_alloc();
    at_ = static_cast<char*>(at);
    ::madvise(at_, bytes_, MADV_DONTFORK);
    ::madvise(at_, bytes_, MADV_HUGEPAGE);
  }
  ~Blocks() { ::munmap(at_, bytes_); }
  Blocks(const Blocks&) = delete;
  Blocks& operator=(const Blocks&) = delete;
  char* block(unsigned i) const { return at_ + i * kBlock; }

 private:
  std::size_t bytes_;
  char* at_;
};

// The reads of one thread.
class Reader {
 public:
  Reader(const std::vector<Job>& jobs, const std::vector<Run>& runs, unsigned blocks, const ReadOptions& options)
      : jobs_(jobs),
        runs_(runs),
        in_place_(options.in_place),
        memory_(blocks),
        slots_(blocks),
        queue_(options.make(blocks * kParts)) {}
  ~Reader() { take_all(*queue_, in_flight_); }
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  void run(std::atomic<std::size_t>& next) {
    for (unsigned slot = 0; slot < slots_.size(); ++slot) begin(slot, next);
    while (in_flight_ > 0) {
      queue_->submit(1);
      for (IoResult result; queue_->take(result);) {
        --in_flight_;
        const auto slot = static_cast<unsigned>(result.tag / kParts);
        const auto part = static_cast<unsigned>(result.tag % kParts);
        if (!arrived(slot, part, result.bytes) || --slots_[slot].parts > 0) continue;
        hand_over(slot);
        begin(slot, next);
      }
    }
  }

 private:
  struct Slot {
    const Run* run = nullptr;
    char* memory = nullptr;          // memory that the disk writes to: a block, or the segment's target
    std::int64_t begin = 0;          // offset in the file of the first byte in `memory`
    std::int64_t at[kParts] = {};    // offset of the next read of each part
    std::int64_t stop[kParts] = {};  // offset of the end of each part
    unsigned parts = 0;              // parts that have not arrived
  };

  // Returns true if the disk can write the run directly to its place: the run is one segment of whole pages.
  bool straight(const Run& run) const {
    const Segment& segment = *jobs_[run.first].segment;
    const auto address = reinterpret_cast<std::uintptr_t>(segment.target);
    return run.last == run.first + 1 && segment.offset % kAlign == 0 && segment.bytes % kAlign == 0 &&
           address % static_cast<std::uintptr_t>(kAlign) == 0;
  }
  const Job& first_of(const Slot& slot) const { return jobs_[slot.run->first]; }

  void begin(unsigned number, std::atomic<std::size_t>& next) {
    const std::size_t found = next.fetch_add(1, std::memory_order_relaxed);
    if (found >= runs_.size()) return;
    Slot& slot = slots_[number];
    slot.run = &runs_[found];
    slot.begin = down(slot.run->offset);
    slot.memory = in_place_ && straight(*slot.run) ? first_of(slot).segment->target : memory_.block(number);
    const std::int64_t end = up(slot.run->end);
    for (std::int64_t at = slot.begin; at < end; at += kRequest) {
      slot.at[slot.parts] = at;
      slot.stop[slot.parts] = std::min(end, at + kRequest);
      start(number, slot.parts++);
    }
    queue_->submit(0);  // starts these reads before the next block is planned
  }

  void start(unsigned number, unsigned part) {
    const Slot& slot = slots_[number];
    const std::int64_t at = slot.at[part];
    queue_->read(first_of(slot).file->direct(), slot.memory + (at - slot.begin),
                 static_cast<std::size_t>(slot.stop[part] - at), at, number * kParts + part);
    ++in_flight_;
  }

  // Returns false if the part is incomplete and its read continues.
  bool arrived(unsigned number, unsigned part, std::int64_t result) {
    Slot& slot = slots_[number];
    SegmentFile& file = *first_of(slot).file;
    const bool refused = (result == -EINVAL || result == -EOPNOTSUPP) && file.direct() != file.plain();
    if (refused) file.refuse_direct();
    if (result < 0 && !refused && result != -EINTR && result != -EAGAIN) first_of(slot).fail(static_cast<int>(-result));
    const std::int64_t got = slot.at[part] + std::max<std::int64_t>(result, 0);
    if (got >= std::min(slot.stop[part], slot.run->end)) return true;
    if (result >= 0) {
      // A direct read must begin at an aligned position; a read that makes no progress has met the end of the file.
      const std::int64_t from = file.direct() == file.plain() ? got : down(got);
      if (from == slot.at[part]) ends_at(slot, got);
      slot.at[part] = from;
    }
    start(number, part);
    return false;
  }

  [[noreturn]] void ends_at(const Slot& slot, std::int64_t offset) const {
    for (std::size_t i = slot.run->first; i < slot.run->last; ++i) {
      if (jobs_[i].end() > offset) jobs_[i].ends_at(offset);
    }
    first_of(slot).ends_at(offset);
  }

  void hand_over(unsigned number) const {
    const Slot& slot = slots_[number];
    for (std::size_t i = slot.run->first; i < slot.run->last; ++i) {
      const Segment& segment = *jobs_[i].segment;
      const char* const from = slot.memory + (segment.offset - slot.begin);
      std::uint32_t crc = 0;
      for (std::int64_t at = 0; at < segment.bytes; at += kSumStep) {
        const auto step = static_cast<std::size_t>(std::min(kSumStep, segment.bytes - at));
        crc = crc32(crc, from + at, step);
        if (from != segment.target) std::memcpy(segment.target + at, from + at, step);
      }
      jobs_[i].compare(crc);
    }
  }

  const std::vector<Job>& jobs_;
  const std::vector<Run>& runs_;
  const bool in_place_;
  const Blocks memory_;
  std::vector<Slot> slots_;
  const std::unique_ptr<IoQueue> queue_;
  unsigned in_flight_ = 0;
};

}  // namespace

std::vector<Run> runs_of(const std::vector<Job>& jobs) {
  std::vector<Run> runs;
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    const Job& job = jobs[i];
    const bool joins = !runs.empty() && jobs[runs.back().first].file == job.file &&
                       job.segment->offset <= runs.back().end + kGap && job.end() - runs.back().offset <= kMostSegment;
    if (!joins) runs.push_back({i, i, job.segment->offset, job.segment->offset});
    runs.back().last = i + 1;
    runs.back().end = std::max(runs.back().end, job.end());
  }
  return runs;
}

void read_runs(const std::vector<Job>& jobs, const std::vector<Run>& runs, std::atomic<std::size_t>& next,
               unsigned blocks, const ReadOptions& options) {
  Reader reader(jobs, runs, blocks, options);
  try {
    reader.run(next);
  } catch (...) {
    next = runs.size();  // stops the other threads
    throw;
  }
}

}  // namespace ff::storage
