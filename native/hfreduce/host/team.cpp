#include "hfreduce/host/team.hpp"

#include <unistd.h>

#include <algorithm>

#include "base/io/socket.hpp"
#include "base/process/fork_guard.hpp"
#include "base/process/interrupts.hpp"
#include "hfreduce/engine/arena.hpp"

namespace ff::hfreduce {
namespace {

constexpr int kSpins = 2000;
constexpr int kReceiveMs = 10'000;            // timeout; the owner sends a descriptor before it posts its operation
constexpr std::uint32_t kAhead = kDepth / 2;  // steps that a rank sleeps through if ranks outnumber cores

}  // namespace

struct alignas(4096) Team::Header {
  static constexpr std::size_t kClaimSets = 4;  // by the posting's number modulo 4; members are at most one apart

  std::atomic<std::int32_t> aborted;  // 0, or 1 + the rank because of which the team is broken
  Gate in, reduced, out;
  Flag decided;                 // number of prioritised operations whose turn is decided
  std::uint64_t decisions[64];  // numbers of these operations, in a ring: no member is two operations ahead
  struct Claims {
    alignas(128) std::atomic<std::uint32_t> done;
    struct {
      alignas(64) std::atomic<std::uint32_t> next;
    } of[kMembers];
  } claims[kClaimSets];
};

struct alignas(128) Team::Slot {
  std::atomic<std::uint32_t> arrived[3];  // the member's own position at each gate: to name the late member
  Posted posted[2];                       // indexed by the posting's number modulo 2: a rank may be one posting ahead
};

std::size_t Team::control_bytes(std::size_t members) {
  return sizeof(Header) + (members * sizeof(Slot) + 4095) / 4096 * 4096 + (members + 1) * kDepth * kChunkBytes;
}

Team::Team(Segment control, std::vector<Member> members, std::size_t me, bool spin)
    : control_(std::move(control)),
      header_(reinterpret_cast<Header*>(control_.data())),
      slots_(reinterpret_cast<Slot*>(control_.data() + sizeof(Header))),
      members_(std::move(members)),
      me_(me),
      spin_(spin),
      peer_segments_(members_.size()) {
  if (members_.size() > kMembers) {
    throw Error(Code::collective, "more than " + std::to_string(kMembers) + " ranks on one host");
  }
  if (control_.size() < control_bytes(members_.size())) {
    throw Error(Code::collective, "the control segment is too small for the ranks of this host");
  }
  for (const Member& member : members_) {
    if (member.socket >= 0) fork_guard::add(member.socket);
  }
  wait_policy_.spins = spin ? kSpins : 0;
  wait_policy_.check_failures = [this] { check_failures(); };
}

Team::~Team() {
  for (const Member& member : members_) {
    if (member.socket >= 0) fork_guard::close(member.socket);
    if (member.process >= 0) ::close(member.process);
  }
}

char* Team::stage(std::size_t member, std::uint32_t step) const {
  char* first = control_.data() + control_.size() - (size() + 1) * kDepth * kChunkBytes;
  return first + (member * kDepth + (step_ + step) % kDepth) * kChunkBytes;
}

char* Team::result(std::uint32_t step) const {
  char* first = control_.data() + control_.size() - kDepth * kChunkBytes;
  return first + (result_step_ + step) % kDepth * kChunkBytes;
}

Gate& Team::gate(Counter counter) {
  switch (counter) {
    case Counter::in: return header_->in;
    case Counter::reduced: return header_->reduced;
    default: return header_->out;
  }
}

void Team::arrive(Counter counter, std::uint32_t first, std::uint32_t last) {
  slots_[me_].arrived[static_cast<int>(counter)].store(last, std::memory_order_relaxed);
  gate(counter).arrive(first, last, size());
}

void Team::wait(Counter counter, std::uint32_t step) {
  if (!wait_for(gate(counter).opened, step + 1, wait_policy_)) fail_deadline(counter, step);
}

// Throws an error that blames the late member. A member whose input is missing is to blame for all later gates.
void Team::fail_deadline(Counter counter, std::uint32_t step) {
  std::size_t late = me_ == 0 ? 1 : 0;
  for (const Counter c : {counter, Counter::in}) {
    if (c != counter && counter == Counter::out) break;  // the gate `out` has another numbering of steps
    for (std::size_t r = 0; r < size(); ++r) {
      const std::uint32_t arrived = slots_[r].arrived[static_cast<int>(c)].load();
      if (r != me_ && static_cast<std::int32_t>(arrived - (step + 1)) < 0) late = r;
    }
  }
  const int rank = members_[late].rank;
  throw Error(Code::late,
              to_string(call_) + " timed out: rank " + std::to_string(rank) + " did not " +
                  (counter == Counter::in ? "join" : "finish") + " within the timeout",
              rank);
}

void Team::check_failures() {
  if (const std::int32_t aborted = header_->aborted.load(); aborted != 0) {
    if (gate(Counter::in).open(step_)) compare_posts();  // a mismatch may be the cause
    throw Error(Code::rank_failed, to_string(call_) + " was aborted because of rank " + std::to_string(aborted - 1),
                aborted - 1);
  }
  for (const Member& member : members_) {
    if ((member.socket >= 0 && hung_up(member.socket)) || (member.process >= 0 && process_ended(member.process))) {
      throw Error(Code::rank_failed,
                  to_string(call_) + ": rank " + std::to_string(member.rank) + " died or left the group", member.rank);
    }
  }
  interrupts::check(members_[me_].rank);
}

void Team::abort(int rank) {
  std::int32_t none = 0;
  header_->aborted.compare_exchange_strong(none, rank + 1);
  for (const Counter c : {Counter::in, Counter::reduced, Counter::out}) gate(c).opened.wake();
  header_->decided.wake();
}

void Team::announce(std::int32_t segment) {
  if (segment < 0 || std::find(announced_.begin(), announced_.end(), segment) != announced_.end()) {
    return;
  }
  const int fd = Arena::of_process().descriptor(segment);
  for (const Member& member : members_) {
    if (member.socket >= 0) send_descriptor(member.socket, segment, fd);
  }
  announced_.push_back(segment);
}

char* Team::map(std::size_t member, const Place& place) {
  if (member == me_) return Arena::of_process().address(place.segment) + place.offset;
  return segment(member, place.segment)->data() + place.offset;
}

std::shared_ptr<Segment> Team::segment(std::size_t member, std::int32_t number) {
  auto& known = peer_segments_[member];
  const auto index = static_cast<std::size_t>(number);
  while (known.size() <= index || known[index] == nullptr) {
    const ReceivedDescriptor received = receive_descriptor(members_[member].socket, kReceiveMs);
    const auto arrived = static_cast<std::size_t>(received.number);
    if (known.size() <= arrived) known.resize(arrived + 1);
    known[arrived] = std::make_shared<Segment>(Segment::attach(received.fd));
  }
  return known[index];
}

const Posted& Team::posted(std::size_t member) const { return slots_[member].posted[posts_ % 2]; }

// Waits until the staging slot of the operation's first step is free.
void Team::begin(const Call& call, Deadline deadline) {
  call_ = call;
  wait_policy_.deadline = deadline;
  wait(Counter::reduced, step_ - kDepth);
}

// REQUIRES: the input of the first step is readable.
void Team::post(const Posted& mine) {
  ++posts_;
  announce(mine.in.segment);
  announce(mine.out.segment);
  Posted& slot = slots_[me_].posted[posts_ % 2];
  slot.call = call_;
  slot.in = mine.in;
  slot.out = mine.out;
  slot.copies = mine.copies;
  if (mine.copies) {
    std::copy_n(mine.gives, size(), slot.gives);
    std::copy_n(mine.takes, size(), slot.takes);
  }
  slots_[me_].arrived[0].store(step_ + 1, std::memory_order_relaxed);
  // Resets the claims of the next posting. No member has reached that posting yet, and no member is still in the
  // earlier posting that used the same claims.
  if (me_ == 0) {
    auto& claims = header_->claims[(posts_ + 1) % Header::kClaimSets];
    claims.done.store(0, std::memory_order_relaxed);
    for (std::size_t r = 0; r < size(); ++r) claims.of[r].next.store(0, std::memory_order_relaxed);
  }
}

void Team::compare_posts() {
  for (std::size_t r = 0; r < size(); ++r) {
    const Call theirs = posted(r).call;
    if (theirs == call_) continue;
    throw Error(Code::collective, "ranks disagree: rank " + std::to_string(members_[me_].rank) + " calls " +
                                      to_string(call_) + ", rank " + std::to_string(members_[r].rank) + " calls " +
                                      to_string(theirs));
  }
}

void Team::enter(const Posted& mine) {
  post(mine);
  header_->in.arrive(step_, step_ + 1, size());
  wait(Counter::in, step_);
  compare_posts();
}

void Team::meet(const Posted& mine) {
  enter(mine);
  arrive(Counter::reduced, step_, step_ + 1);
  ++step_;
}

void Team::again(Pass& pass) {
  pass.settle();
  drive(pass, 0);
}

void Team::solo(const Posted& mine, const std::function<void()>& work) {
  post(mine);
  if (header_->in.arrive(step_, step_ + 1, size())) {
    compare_posts();
    wait(Counter::out, result_step_ - kDepth);
    work();
    header_->reduced.opened.raise(step_ + 1);
  } else {
    wait(Counter::reduced, step_);
  }
}

void Team::finish_solo() {
  arrive(Counter::out, result_step_, result_step_ + 1);
  ++result_step_;
  ++step_;
}

void Team::publish_next(std::uint64_t number) {
  header_->decisions[decisions_ % 64] = number;
  header_->decided.raise(++decisions_);
}

std::uint64_t Team::await_next(Deadline deadline) {
  wait_policy_.deadline = deadline;
  if (!wait_for(header_->decided, decisions_ + 1, wait_policy_)) {
    const int rank = members_[me_ == 0 ? 1 : 0].rank;
    throw Error(Code::late, "timed out: rank " + std::to_string(rank) + " did not announce its next operation", rank);
  }
  return header_->decisions[decisions_++ % 64];
}

bool Team::claim(std::size_t parts_each, std::size_t& owner, std::size_t& part) {
  auto& claims = header_->claims[posts_ % Header::kClaimSets];
  for (std::size_t i = 0; i < size(); ++i) {
    owner = (me_ + i) % size();
    std::atomic<std::uint32_t>& next = claims.of[owner].next;
    if (next.load(std::memory_order_relaxed) >= parts_each) continue;
    part = next.fetch_add(1, std::memory_order_relaxed);
    if (part < parts_each) return true;
  }
  return false;
}

void Team::completed(std::size_t parts, std::size_t of) {
  auto& claims = header_->claims[posts_ % Header::kClaimSets];
  const auto n = static_cast<std::uint32_t>(parts);
  if (claims.done.fetch_add(n, std::memory_order_acq_rel) + n == of) {
    header_->reduced.opened.raise(step_ + 1);
  }
}

void Team::wait_completed() {
  wait(Counter::reduced, step_);
  ++step_;
}

// Publishes, consumes and collects as much as possible, and sleeps only if nothing can be done. A gate may open between
// the check that found it shut and the choice of the gate to wait for. That is harmless: a wait for an open gate
// returns at once. The choice names only gates that this pass advances, because a wait for any other gate would never
// end.
//
// If ranks outnumber cores, a rank runs as many steps as it can before it notifies the other ranks, because every
// notification costs a context switch. Sleeping for several steps cannot deadlock: the steps that a rank has published
// and taken let all other ranks proceed kAhead steps without it.
void Team::drive(Pass& pass, std::uint32_t published) {
  const std::uint32_t base = step_, result_base = result_step_, steps = pass.steps;
  const bool burst = !spin_;
  std::uint32_t consumed = 0, collected = 0;
  const auto free_to_publish = [&] {
    return published < steps && gate(Counter::reduced).open(base + published - kDepth) && pass.ready(published);
  };
  const auto free_to_consume = [&] {
    return consumed < published && gate(Counter::in).open(base + consumed) &&
           (!pass.uses_result || gate(Counter::out).open(result_base + consumed - kDepth));
  };
  const auto free_to_collect = [&] { return collected < consumed && gate(Counter::reduced).open(base + collected); };
  while (collected < steps && !(pass.leaves_early && consumed == steps)) {
    const std::uint32_t before[3] = {published, consumed, collected};
    while (free_to_publish()) {
      pass.publish(published++);
      if (!burst) break;
    }
    if (published != before[0]) arrive(Counter::in, base + before[0], base + published);
    while (free_to_consume()) {
      pass.consume(consumed++);
      if (!burst) break;
    }
    if (consumed != before[1]) arrive(Counter::reduced, base + before[1], base + consumed);
    while (free_to_collect()) {
      pass.collect(collected++);
      if (!burst) break;
    }
    if (collected != before[2] && pass.uses_result) {
      arrive(Counter::out, result_base + before[2], result_base + collected);
    }
    if (published + consumed + collected != before[0] + before[1] + before[2]) continue;

    const std::uint32_t ahead = burst ? kAhead : 1;
    if (pass.busy()) {
      pass.idle();
    } else if (collected < consumed) {
      wait(Counter::reduced, base + std::min(consumed, collected + ahead) - 1);
    } else if (consumed == published) {
      wait(Counter::reduced, base + published - kDepth);
    } else if (pass.uses_result && gate(Counter::in).open(base + consumed)) {
      wait(Counter::out, result_base + consumed - kDepth);
    } else {
      wait(Counter::in, base + std::min(published, consumed + ahead) - 1);
    }
  }
  step_ += steps;
  if (pass.uses_result) result_step_ += steps;
}

}  // namespace ff::hfreduce
