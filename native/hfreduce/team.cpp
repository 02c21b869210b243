#include "hfreduce/team.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "base/socket.hpp"
#include "hfreduce/arena.hpp"

namespace ff::hfreduce {
namespace {

constexpr int kSpins = 2000;
constexpr int kReceiveMs = 10'000;  // a descriptor was sent before its operation was posted

}  // namespace

struct alignas(4096) Team::Header {
  std::atomic<std::int32_t> aborted;  // 0, or 1 + the rank because of which the team is broken
};

struct alignas(128) Team::Slot {
  struct Posted {
    Call call;
    std::int32_t segment;
    std::uint64_t offset;
  };
  Flag in, reduced, out;
  Posted posted[2];  // by parity of the operation's number: a rank may run one operation ahead
};

// How a pass divides the tensor: `slices` slices by owner, each in `steps` pieces; step k moves piece k of
// every slice.
struct Team::Plan {
  std::size_t count, width, slices, piece, steps;
  DType dtype;

  std::size_t begin(std::size_t slice) const { return slice_begin(count, dtype, slice, slices); }
  // First element and number of elements of piece k of a slice; empty past its end.
  std::pair<std::size_t, std::size_t> range(std::size_t slice, std::size_t k) const {
    if (slice >= slices) return {0, 0};
    const std::size_t end = begin(slice + 1);
    const std::size_t first = std::min(begin(slice) + k * piece, end);
    return {first, std::min(piece, end - first)};
  }
};

std::size_t Team::control_bytes(std::size_t members) {
  return sizeof(Header) + (members * sizeof(Slot) + 4095) / 4096 * 4096 +
         (members + 1) * kDepth * kChunkBytes;
}

Team::Team(Segment control, std::vector<Member> members, std::size_t me, bool spin)
    : control_(std::move(control)),
      header_(reinterpret_cast<Header*>(control_.data())),
      slots_(reinterpret_cast<Slot*>(control_.data() + sizeof(Header))),
      members_(std::move(members)),
      me_(me),
      peer_segments_(members_.size()) {
  if (members_.size() > kMembers) {
    throw Error(Code::collective, "more than " + std::to_string(kMembers) + " ranks on one host");
  }
  if (control_.size() < control_bytes(members_.size())) {
    throw Error(Code::collective, "the control segment is too small for the ranks of this host");
  }
  patience_.spins = spin ? kSpins : 0;
  patience_.look_around = [this] { look_around(); };
}

Team::~Team() {
  for (const Member& member : members_) {
    if (member.socket >= 0) ::close(member.socket);
    if (member.process >= 0) ::close(member.process);
  }
}

char* Team::stage(std::size_t member, std::uint32_t step) const {
  char* first = control_.data() + control_.size() - (size() + 1) * kDepth * kChunkBytes;
  return first + (member * kDepth + step % kDepth) * kChunkBytes;
}

char* Team::result(std::uint32_t step) const { return stage(size(), step); }

Flag& Team::flag(std::size_t member, Counter counter) {
  Slot& slot = slots_[member];
  switch (counter) {
    case Counter::in: return slot.in;
    case Counter::reduced: return slot.reduced;
    default: return slot.out;
  }
}

void Team::raise(Counter counter, std::uint32_t to) { flag(me_, counter).raise(to); }

void Team::wait_all(Counter counter, std::uint32_t target) {
  for (std::size_t r = 0; r < size(); ++r) {
    if (r == me_) continue;
    if (!wait_for(flag(r, counter), target, patience_)) fail_deadline(r, counter);
  }
}

void Team::fail_deadline(std::size_t late, Counter counter) {
  const int rank = members_[late].rank;
  throw Error(Code::rank_failed,
              to_string(call_) + ": rank " + std::to_string(rank) + " did not " +
                  (counter == Counter::in ? "join" : "finish") + " within the timeout",
              rank);
}

void Team::look_around() {
  if (const std::int32_t aborted = header_->aborted.load(); aborted != 0) {
    throw Error(Code::rank_failed,
                to_string(call_) + " was given up because of rank " + std::to_string(aborted - 1),
                aborted - 1);
  }
  for (const Member& member : members_) {
    if ((member.socket >= 0 && hung_up(member.socket)) ||
        (member.process >= 0 && process_ended(member.process))) {
      throw Error(Code::rank_failed,
                  to_string(call_) + ": rank " + std::to_string(member.rank) + " died or left the group",
                  member.rank);
    }
  }
}

void Team::abort(int rank) {
  std::int32_t none = 0;
  header_->aborted.compare_exchange_strong(none, rank + 1);
  for (std::size_t r = 0; r < size(); ++r) {
    for (const Counter c : {Counter::in, Counter::reduced, Counter::out}) flag(r, c).wake();
  }
}

void Team::announce(std::int32_t segment) {
  if (std::find(announced_.begin(), announced_.end(), segment) != announced_.end()) return;
  const int fd = Arena::of_process().descriptor(segment);
  for (const Member& member : members_) {
    if (member.socket >= 0) send_descriptor(member.socket, segment, fd);
  }
  announced_.push_back(segment);
}

char* Team::map_peer(std::size_t peer, std::int32_t segment, std::uint64_t offset) {
  auto& known = peer_segments_[peer];
  const auto index = static_cast<std::size_t>(segment);
  while (known.size() <= index || known[index] == nullptr) {
    const ReceivedDescriptor received = receive_descriptor(members_[peer].socket, kReceiveMs);
    const auto number = static_cast<std::size_t>(received.number);
    if (known.size() <= number) known.resize(number + 1);
    known[number] = std::make_unique<Segment>(Segment::attach(received.fd));
  }
  return known[index]->data() + offset;
}

// Waits until the staging slot of the operation's first step is free.
void Team::begin(const Call& call, const Operand& mine, Clock::time_point deadline) {
  call_ = call;
  mine_ = mine;
  patience_.deadline = deadline;
  any_staged_ = mine.segment < 0;  // of the others post() learns
  wait_all(Counter::reduced, step_ + 1 - static_cast<std::uint32_t>(kDepth));
}

// Publishes this rank's call, then learns and compares everybody's. REQUIRES: the input of the first step is
// readable: a private tensor's first chunk is in the staging ring.
void Team::post() {
  const Call& call = call_;
  const Operand& mine = mine_;
  if (mine.segment >= 0) announce(mine.segment);
  slots_[me_].posted[call.seq % 2] = {call, mine.segment, mine.offset};
  raise(Counter::in, step_ + 1);
  wait_all(Counter::in, step_ + 1);
  tensors_.assign(size(), nullptr);
  any_staged_ = false;
  for (std::size_t r = 0; r < size(); ++r) {
    const Slot::Posted theirs = slots_[r].posted[call.seq % 2];
    if (theirs.call != call) {
      throw Error(Code::collective,
                  "ranks disagree: rank " + std::to_string(members_[me_].rank) + " calls " +
                      to_string(call) + ", rank " + std::to_string(members_[r].rank) + " calls " +
                      to_string(theirs.call));
    }
    if (theirs.segment < 0) {
      any_staged_ = true;
    } else {
      tensors_[r] = r == me_ ? mine.data : map_peer(r, theirs.segment, theirs.offset);
    }
  }
}

void Team::allreduce(const Call& call, const Operand& mine, double scale,
                     Clock::time_point deadline) {
  const std::size_t bytes = call.count * size_of(call.dtype);
  if (bytes <= kDirectBytes) {
    begin(call, {mine.data, -1, 0}, deadline);
    std::memcpy(stage(me_, step_), mine.data, bytes);
    post();
    direct(scale);
    return;
  }
  begin(call, mine, deadline);
  if (mine.segment < 0) copy_in(plan(size()), 0);
  post();
  pipeline(size(), true, true, scale);
}

void Team::reduce_scatter(const Call& call, const Operand& mine, std::size_t slices,
                          Clock::time_point deadline) {
  begin(call, mine, deadline);
  if (mine.segment < 0) copy_in(plan(slices), 0);
  post();
  pipeline(slices, true, false, 1.0);
}

void Team::all_gather(std::size_t slices, Clock::time_point deadline) {
  patience_.deadline = deadline;
  pipeline(slices, false, true, 1.0);
}

// Small tensors: one exchange of flags; every rank reads all inputs and keeps the result to itself.
void Team::direct(double scale) {
  std::vector<const void*> sources(size());
  for (std::size_t r = 0; r < size(); ++r) sources[r] = stage(r, step_);
  void* target = mine_.data;
  kernel_of(call_.dtype)(&target, 1, sources.data(), size(), call_.count, scale);
  ++step_;
  raise(Counter::reduced, step_);
  raise(Counter::out, step_);
}

// The division of the tensor among `slices` owners, in pieces that fit the staging slots; without a private tensor
// there is no copy to hide work behind, and one step moves whole slices.
Team::Plan Team::plan(std::size_t slices) const {
  Plan plan{call_.count, size_of(call_.dtype), slices, 0, 1, call_.dtype};
  std::size_t longest = 1;
  for (std::size_t i = 0; i < slices; ++i) {
    longest = std::max(longest, plan.begin(i + 1) - plan.begin(i));
  }
  plan.piece = any_staged_ ? kChunkBytes / slices / 64 * 64 / plan.width : longest;
  plan.steps = (longest + plan.piece - 1) / plan.piece;
  return plan;
}

void Team::pipeline(std::size_t slices, bool reduce, bool gather, double scale) {
  const Plan plan = this->plan(slices);
  const auto base = step_;
  const auto depth = static_cast<std::uint32_t>(kDepth);
  const bool staged = mine_.segment < 0;
  const auto end = base + static_cast<std::uint32_t>(plan.steps);
  if (!reduce || !staged) raise(Counter::in, end);      // all of the input is readable already
  if (!gather || !staged) raise(Counter::out, end);     // nothing will be taken from the result ring

  for (std::size_t k = 0; k < plan.steps + 2; ++k) {
    const auto step = base + static_cast<std::uint32_t>(k);
    if (reduce && staged && k >= 1 && k < plan.steps) {  // step 0: before the call was posted
      wait_all(Counter::reduced, step + 1 - depth);
      copy_in(plan, k);
      raise(Counter::in, step + 1);
    }
    if (k >= 1 && k - 1 < plan.steps) {
      if (reduce) wait_all(Counter::in, step);
      if (gather && any_staged_) wait_all(Counter::out, step - depth);
      reduce_piece(plan, k - 1, reduce, gather, scale);
      raise(Counter::reduced, step);
    }
    if (k >= 2 && gather && staged) {
      wait_all(Counter::reduced, step - 1);
      copy_out(plan, k - 2);
      raise(Counter::out, step - 1);
    }
  }
  step_ = end;
  // Others read and write a tensor in an arena until they have reduced their last piece.
  if (!staged) wait_all(Counter::reduced, end);
}

// Piece k of every slice but one's own, side by side in the staging slot.
void Team::copy_in(const Plan& plan, std::size_t k) {
  char* slot = stage(me_, step_ + static_cast<std::uint32_t>(k));
  for (std::size_t i = 0; i < plan.slices; ++i) {
    if (i == me_) continue;
    const auto [first, n] = plan.range(i, k);
    std::memcpy(slot + i * plan.piece * plan.width, mine_.data + first * plan.width, n * plan.width);
  }
}

// One's own slice: from everybody's input (reduce) or one's own tensor, to whoever needs it.
void Team::reduce_piece(const Plan& plan, std::size_t k, bool reduce, bool gather, double scale) {
  const auto [first, n] = plan.range(me_, k);
  if (n == 0) return;
  const std::size_t offset = first * plan.width;
  const std::size_t staged_offset = me_ * plan.piece * plan.width;
  const auto step = step_ + static_cast<std::uint32_t>(k);
  std::array<const void*, kMembers> sources;
  std::array<void*, kMembers + 1> targets;
  std::size_t sourced = 0, targeted = 0;
  bool to_result = false;
  for (std::size_t r = 0; r < size(); ++r) {
    char* tensor = r == me_ ? mine_.data : tensors_[r];
    if (reduce) {
      sources[sourced++] = tensor != nullptr ? tensor + offset : stage(r, step) + staged_offset;
    }
    if (r == me_ ? reduce : gather && tensor != nullptr) targets[targeted++] = tensor + offset;
    if (r != me_ && gather && tensor == nullptr) to_result = true;
  }
  if (!reduce) sources[sourced++] = mine_.data + offset;
  if (to_result) targets[targeted++] = result(step) + staged_offset;
  if (targeted == 0) return;
  if (reduce) {
    kernel_of(call_.dtype)(targets.data(), targeted, sources.data(), sourced, n, scale);
  } else {
    for (std::size_t t = 0; t < targeted; ++t) std::memcpy(targets[t], sources[0], n * plan.width);
  }
}

void Team::copy_out(const Plan& plan, std::size_t k) {
  const char* slot = result(step_ + static_cast<std::uint32_t>(k));
  for (std::size_t i = 0; i < plan.slices; ++i) {
    if (i == me_) continue;
    const auto [first, n] = plan.range(i, k);
    std::memcpy(mine_.data + first * plan.width, slot + i * plan.piece * plan.width, n * plan.width);
  }
}

}  // namespace ff::hfreduce
