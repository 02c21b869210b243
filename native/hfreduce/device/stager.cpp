#include "hfreduce/device/stager.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <numeric>

#include "hfreduce/engine/arena.hpp"

namespace ff::hfreduce {

struct Span {  // memory of the device and its mirror
  char* device;
  char* host;
  std::size_t bytes;
};
using Spans = std::vector<Span>;

namespace {

std::size_t bytes_of(const Pieces& pieces) {
  return std::accumulate(pieces.begin(), pieces.end(), std::size_t{0},
                         [](std::size_t sum, const Piece& piece) { return sum + piece.bytes; });
}

bool same_memory(const Pieces& a, const Pieces& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const Piece& x, const Piece& y) { return x.data == y.data && x.bytes == y.bytes; });
}

// Returns pieces of the same sizes, side by side from `host` on.
Pieces mirrored(const Pieces& pieces, char* host) {
  Pieces mirrors;
  for (const Piece& piece : pieces) {
    mirrors.push_back({host, piece.bytes});
    host += piece.bytes;
  }
  return mirrors;
}

// Returns the copies to make; merges copies that are adjacent in both memories.
Spans spans_of(const Pieces& pieces, const Pieces& mirrors) {
  Spans spans;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    if (pieces[i].bytes == 0) continue;
    if (!spans.empty() && spans.back().device + spans.back().bytes == pieces[i].data) {
      spans.back().bytes += pieces[i].bytes;
    } else {
      spans.push_back({pieces[i].data, mirrors[i].data, pieces[i].bytes});
    }
  }
  return spans;
}

Pieces cut(const Pieces& pieces, std::size_t begin, std::size_t bytes) {
  Pieces part;
  for (const Piece& piece : pieces) part.push_back({piece.data + begin, bytes});
  return part;
}

}  // namespace

// ---- Device ----

void Device::pin_segment_of(const char* block) {
  const Arena& arena = Arena::of_process();
  const auto place = arena.find(block, 1);
  if (!place) throw Error(Code::invalid, "only memory of the arena can be pinned");
  const std::lock_guard lock(pin_mutex_);
  if (pinned_.contains(place->segment)) return;
  char* data = arena.address(place->segment);
  if (pin(data, arena.bytes_of(place->segment))) unpin_.push_back(data);
  pinned_.insert(place->segment);
}

Device::Event Device::borrow_event() {
  {
    const std::lock_guard lock(event_mutex_);
    if (!events_.empty()) {
      const Event event = events_.back();
      events_.pop_back();
      return event;
    }
  }
  return make_event();
}

void Device::give_back(Event event) noexcept {
  const std::lock_guard lock(event_mutex_);
  events_.push_back(event);
}

void Device::close() noexcept {
  for (const Event event : events_) drop_event(event);
  for (char* data : unpin_) unpin(data);
  events_.clear();
  unpin_.clear();
}

// ---- Passage ----

Passage::~Passage() { device_.give_back(done_); }

void Passage::Part::poison() const {
  for (const Piece& piece : out) std::memset(piece.data, 0xFF, piece.bytes);
}

// A result that replaces its input must not be poisoned before the input has arrived. So whichever of arrival and
// failure comes second poisons the result. Both precede the copy out.
void Passage::arrive(void* argument) noexcept {
  const Part& part = *static_cast<Part*>(argument);
  part.passage->arrived_.raise(part.number);
  if (part.failed) part.poison();
}

void Passage::end(void* passage) noexcept { static_cast<Passage*>(passage)->let_go(); }

void Passage::let_go() noexcept {
  if (users_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  const auto alive = std::move(self_);
  Arena::of_process().release(mirror_);
  finished_.raise(1);
}

bool Passage::wait(double seconds) {
  using std::chrono::duration;
  const auto deadline = seconds < 0
                            ? Clock::time_point::max()
                            : Clock::now() + std::chrono::duration_cast<Clock::duration>(duration<double>(seconds));
  return wait_for(finished_, 1, {0, deadline, [] {}});
}

// ---- Staging ----

bool Staging::await_input(const WaitPolicy& policy) const {
  return !part_.has_input || wait_for(passage_->arrived_, part_.number, policy);
}

void Staging::finish(bool good) noexcept {
  if (!passage_) return;
  const auto passage = std::move(passage_);
  if (!good) {
    part_.failed = true;
    const std::uint32_t arrived = passage->arrived_.value;  // sequentially consistent, as is `failed` in arrive()
    if (static_cast<std::int32_t>(arrived - part_.number) >= 0) part_.poison();
  }
  passage->open_->raise(part_.number);
  passage->let_go();
}

// ---- Stager ----

struct Stager::Plan {
  std::vector<Spans> in, out;  // by operation
};

Stager::Stager(Device& device) : device_(device), inward_(device.make_stream()), outward_(device.make_stream()) {}

Stager::~Stager() {
  device_.drop_stream(inward_);
  device_.drop_stream(outward_);
}

// Allocates a gate and the mirrors of inputs and outputs, each beginning on its own cache line.
Stager::Mirrors Stager::make_mirrors(const Request& request) {
  const bool in_place = same_memory(request.in, request.out);
  const std::size_t in_bytes = bytes_of(request.in);
  const std::size_t out_at = in_place ? 0 : (in_bytes + Arena::kAlignment - 1) / Arena::kAlignment * Arena::kAlignment;
  Arena& arena = Arena::of_process();
  static_assert(sizeof(Flag) % Arena::kAlignment == 0);
  char* block = arena.allocate(sizeof(Flag) + std::max(in_bytes, out_at + bytes_of(request.out)));
  try {
    device_.pin_segment_of(block);
  } catch (...) {
    arena.release(block);
    throw;
  }
  char* const mirrors = block + sizeof(Flag);
  return {block, mirrored(request.in, mirrors), mirrored(request.out, mirrors + out_at)};
}

Stager::Staged Stager::stage(const Request& request, const std::vector<std::uint64_t>& counts, Device::Stream user) {
  const bool whole = counts.size() < 2;
  const std::uint64_t count = request.call.count;
  if (!whole && (request.in.size() > 1 || request.out.size() > 1 || count == 0 ||
                 std::accumulate(counts.begin(), counts.end(), std::uint64_t{0}) != count)) {
    throw Error(Code::invalid, "invalid counts: only a call with one tensor can be cut, into parts of its total size");
  }
  auto passage = std::make_shared<Passage>(device_);
  const Mirrors mirrors = make_mirrors(request);
  passage->mirror_ = mirrors.block;
  passage->open_ = new (mirrors.block) Flag{};
  const std::size_t parts = whole ? 1 : counts.size();
  passage->users_ = parts + 1;  // the operations, and the device
  passage->self_ = passage;

  Staged staged{{}, passage};
  Plan plan;
  std::size_t begin = 0;
  for (std::size_t k = 0; k < parts; ++k) {
    Request& operation = staged.operations.emplace_back(request);
    if (whole) {
      operation.in = mirrors.in;
      operation.out = mirrors.out;
      plan.in.push_back(spans_of(request.in, mirrors.in));
      plan.out.push_back(spans_of(request.out, mirrors.out));
    } else {
      const std::size_t width = std::max(bytes_of(request.in), bytes_of(request.out)) / count;
      const std::size_t at = begin * width, bytes = counts[k] * width;
      operation.call.count = counts[k];
      operation.in = cut(mirrors.in, at, bytes);
      operation.out = cut(mirrors.out, at, bytes);
      if (request.residual != nullptr) operation.residual = request.residual + begin;
      if (request.seed != 0) operation.seed = request.seed + (std::uint64_t{k} << 48);
      plan.in.push_back(spans_of(cut(request.in, at, bytes), operation.in));
      plan.out.push_back(spans_of(cut(request.out, at, bytes), operation.out));
      begin += counts[k];
    }
    Passage::Part& part = passage->parts_.emplace_back();
    part.passage = passage.get();
    part.number = static_cast<std::uint32_t>(k + 1);
    part.has_input = !plan.in.back().empty();
    part.out = operation.out;
    operation.staging = std::make_shared<Staging>(passage, part);
  }
  enqueue(*passage, plan, user);
  return staged;
}

// If this throws, the device may be using the passage and its mirrors: they are kept for ever.
void Stager::enqueue(Passage& passage, const Plan& plan, Device::Stream user) {
  const std::size_t parts = plan.in.size();
  const std::lock_guard lock(mutex_);
  struct Borrowed {
    Device& device;
    Device::Event event = device.borrow_event();
    ~Borrowed() { device.give_back(event); }
  };
  const Borrowed ready{device_};
  device_.record(ready.event, user);
  device_.wait(inward_, ready.event);
  // Queues all inward copies first. So no inward copy is behind a gate of its own call, even if both streams share a
  // hardware queue.
  std::vector<std::unique_ptr<Borrowed>> copied;
  for (std::size_t k = 0; k < parts; ++k) {
    for (const auto& [device, host, bytes] : plan.in[k]) device_.to_host(inward_, host, device, bytes);
    device_.call(inward_, &Passage::arrive, &passage.parts_[k]);
    copied.push_back(std::make_unique<Borrowed>(device_));
    device_.record(copied.back()->event, inward_);
  }
  for (std::size_t k = 0; k < parts; ++k) {
    device_.wait(outward_, copied[k]->event);
    if (plan.out[k].empty()) continue;
    device_.hold(outward_, *passage.open_, passage.parts_[k].number);
    for (const auto& [device, host, bytes] : plan.out[k]) device_.to_device(outward_, device, host, bytes);
  }
  device_.record(passage.done_, outward_);
  device_.call(outward_, &Passage::end, &passage);
}

}  // namespace ff::hfreduce
