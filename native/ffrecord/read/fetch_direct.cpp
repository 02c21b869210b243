#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

#include "base/error.hpp"
#include "ffrecord/read/fetch.hpp"

namespace ff::ffrecord {
namespace {

constexpr std::int64_t kAlign = 4096;
constexpr std::int64_t kGap = std::int64_t{32} << 10;  // a gap of at most this many bytes is read, not skipped

// A read in flight: [offset, end) of a file, both multiples of kAlign.
struct Request {
  Source* source;
  int fd;
  std::int64_t offset;
  std::int64_t end;
  std::int64_t needed;  // the read must reach this byte; the file may end before `end`
  std::size_t first;    // index of the first piece that the read touches
};

// The requests of one batch and their progress.
class Direct {
 public:
  Direct(Job& job, DirectQueue& queue) : job_(job), queue_(queue) {
    for (Piece& piece : job.pieces) {
      if (piece.done || piece.source->direct() < 0) continue;
      if (piece.at.bytes > 0) {
        pieces_.push_back(&piece);
      } else {
        complete(piece);
      }
    }
    left_.reserve(pieces_.size());
    for (const Piece* piece : pieces_) left_.push_back(piece->at.bytes);
    plan();
  }

  void run() {
    std::vector<unsigned> idle(std::min(DirectQueue::kDepth, queue_.queue().capacity()));
    for (unsigned i = 0; i < idle.size(); ++i) idle[i] = i;
    in_slot_.resize(idle.size());
    for (std::size_t next = 0; next < requests_.size() || in_flight_ > 0;) {
      for (; next < requests_.size() && !idle.empty(); ++next) {
        in_slot_[idle.back()] = requests_[next];
        start(idle.back());
        idle.pop_back();
      }
      queue_.queue().submit(1);
      IoResult result;
      // Takes only a few results before it starts new reads, so that the disk does not idle during checksums.
      for (int taken = 0; taken < 8 && queue_.queue().take(result); ++taken) {
        --in_flight_;
        const auto slot = static_cast<unsigned>(result.tag);
        if (arrived(slot, result.bytes)) {
          idle.push_back(slot);
        } else {
          start(slot);
        }
      }
    }
  }

  // Waits for the reads in flight, because their memory must not be freed before.
  void drain() {
    IoResult result;
    while (in_flight_ > 0) {
      queue_.queue().submit(1);
      while (queue_.queue().take(result)) --in_flight_;
    }
  }

 private:
  // Merges adjacent pieces to ranges, and cuts these into requests of at most kSlot bytes.
  void plan() {
    for (std::size_t first = 0; first < pieces_.size();) {
      Source* const source = pieces_[first]->source;
      const int fd = source->direct();  // negative if another thread found meanwhile that O_DIRECT is refused
      const std::int64_t start = pieces_[first]->at.offset / kAlign * kAlign;
      std::int64_t end = pieces_[first]->end();
      std::size_t last = first + 1;
      for (; last < pieces_.size() && pieces_[last]->source == source; ++last) {
        if (pieces_[last]->at.offset > end + kGap) break;
        end = std::max(end, pieces_[last]->end());
      }
      std::size_t touched = first;
      for (std::int64_t at = start; fd >= 0 && at < end; at += DirectQueue::kSlot) {
        while (touched + 1 < last && pieces_[touched]->end() <= at) ++touched;
        const std::int64_t stop = std::min(end, at + DirectQueue::kSlot);
        requests_.push_back({source, fd, at, (stop + kAlign - 1) / kAlign * kAlign, stop, touched});
      }
      first = last;
    }
  }

  void start(unsigned slot) {
    const Request& request = in_slot_[slot];
    queue_.queue().read(request.fd, queue_.slot(slot), static_cast<std::size_t>(request.end - request.offset),
                        request.offset, slot);
    ++in_flight_;
  }

  // Handles the bytes of a finished read. Returns false if the request, shortened by these bytes, must be read again.
  bool arrived(unsigned slot, std::int64_t result) {
    Request& request = in_slot_[slot];
    if (result == -EINTR || result == -EAGAIN) return false;
    if (result == -EINVAL || result == -EOPNOTSUPP) {
      request.source->refuse_direct();
      return true;
    }
    if (result < 0)
      throw_errno(
          "cannot read record file '" + request.source->file().path() + "' at byte " + std::to_string(request.offset),
          static_cast<int>(-result));
    const std::int64_t got = request.offset + result;
    const bool whole = got >= request.needed;
    const std::int64_t good = whole ? request.needed : got / kAlign * kAlign;
    if (good <= request.offset) request.source->ends_at(got);
    hand_over(request, queue_.slot(slot), good);
    request.offset = good;
    return whole;
  }

  // Copies [request.offset, end) to the samples there, and checks the samples that are now complete.
  void hand_over(Request& request, const std::uint8_t* data, std::int64_t end) {
    for (std::size_t i = request.first; i < pieces_.size(); ++i) {
      Piece& piece = *pieces_[i];
      if (piece.source != request.source || piece.at.offset >= end) break;
      const std::int64_t from = std::max(piece.at.offset, request.offset);
      const std::int64_t to = std::min(piece.end(), end);
      if (from >= to) continue;
      std::memcpy(piece.target + (from - piece.at.offset), data + (from - request.offset),
                  static_cast<std::size_t>(to - from));
      left_[i] -= to - from;
      if (left_[i] == 0) complete(piece);
    }
  }

  void complete(Piece& piece) const {
    if (job_.check) piece.source->check(piece.sample, piece.at, piece.target);
    piece.done = true;
  }

  Job& job_;
  DirectQueue& queue_;
  std::vector<Piece*> pieces_;      // pieces to be read here
  std::vector<std::int64_t> left_;  // bytes of each piece that are still missing
  std::vector<Request> requests_;
  std::vector<Request> in_slot_;
  unsigned in_flight_ = 0;
};

}  // namespace

DirectQueue::DirectQueue(std::unique_ptr<IoQueue> queue) : queue_(std::move(queue)) {
  constexpr std::size_t kBytes = kDepth * kSlot;
  // Not inherited by forked children, because copy-on-write could move a page away
  // while the disk writes to it.
  void* const at = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) throw std::bad_alloc();
  memory_ = static_cast<std::uint8_t*>(at);
  if (::madvise(memory_, kBytes, MADV_DONTFORK) != 0) {
    ::munmap(memory_, kBytes);
    throw std::bad_alloc();
  }
  ::madvise(memory_, kBytes, MADV_HUGEPAGE);
}

DirectQueue::~DirectQueue() {
  if (own()) ::munmap(memory_, kDepth * kSlot);
}

std::size_t fetch_direct(Job& job, ObjectCache<DirectQueue>& queues, const Calls& calls) {
  const auto missing = [&job] {
    return static_cast<std::size_t>(
        std::count_if(job.pieces.begin(), job.pieces.end(), [](const Piece& piece) { return !piece.done; }));
  };
  std::unique_ptr<DirectQueue> queue = queues.take();
  if (queue && !queue->own()) queue = nullptr;
  if (!queue) {
    auto fresh = calls.queue(DirectQueue::kDepth);
    if (!fresh) return missing();
    queue = std::make_unique<DirectQueue>(std::move(fresh));
  }
  Direct direct(job, *queue);
  try {
    direct.run();
  } catch (...) {
    direct.drain();
    throw;
  }
  queues.give(std::move(queue));
  return missing();
}

}  // namespace ff::ffrecord
