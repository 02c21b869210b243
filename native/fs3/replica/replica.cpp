// Roles, the effects of a new routing or lease, and answers that continue jobs.
#include "fs3/replica/replica.hpp"

#include <algorithm>

#include "fs3/replica/transitions.hpp"

namespace ff::fs3::replica {

namespace {

Signal answer_signal(Status status) {
  switch (status) {
    case Status::ok: return Signal::acknowledged;
    case Status::corrupt: return Signal::their_corrupt;
    case Status::no_space: return Signal::their_no_space;
    default: return Signal::unanswered;
  }
}

}  // namespace

Replica::Replica(TargetId target, Incarnation incarnation, const Lookup& lookup, Options options)
    : target_(target),
      incarnation_(incarnation),
      lookup_(lookup),
      options_(options),
      complete_(lookup.complete()),
      floor_(std::max<Version>(lookup.floor(), 1)) {
  if (!complete_) local_.state = Local::faulty;
  for (const Pending& pending : lookup.pendings()) {
    Chunk& chunk = open(pending.chunk).second;
    chunk.pending = pending.version;
    chunk.pending_length = pending.length;
    chunk.removes = pending.removes;
    chunk.tag = pending.tag;
  }
}

// ---- Routing and lease -------------------------------------------------------------------------------------------

void Replica::on(const Routing& routing) {
  if (routing.version <= chain_) return;
  stopped_ = false;
  take_role(routing);
  if (state_ == State::syncing && role_ == State::syncing) {
    complete_ = false;
    act(Mark{});
  }
  regroup();
  if (serving() && successor_syncs_) {
    walk_.phase = Walk::Phase::compare;
    walk_.sources = {successor_};
  }
  if (role_ == State::recovering) start_recovery();
  report_local_state();
}

void Replica::take_role(const Routing& routing) {
  chain_ = routing.version;
  members_ = routing.members;
  state_ = role_ = State::offline;
  head_ = successor_syncs_ = false;
  predecessor_ = successor_ = recovering_ = 0;
  Incarnation named = 0;
  for (const Member& member : members_) {
    if (member.state == State::recovering) recovering_ = member.target;
    if (member.target != target_) continue;
    state_ = member.state;
    named = member.incarnation;
  }
  const bool works = state_ == State::serving || state_ == State::recovering || state_ == State::syncing;
  const bool trusted = complete_ || state_ == State::syncing;
  if (!failed_ && trusted && (!works || named == incarnation_)) role_ = state_;
  if (role_ != State::serving && role_ != State::syncing) return;
  bool behind = false;  // the loop has passed this target
  head_ = role_ == State::serving;
  for (const Member& member : members_) {
    if (member.state != State::serving && member.state != State::syncing) continue;
    if (member.target == target_) {
      behind = true;
    } else if (!behind) {
      predecessor_ = member.target;
      head_ = false;
    } else if (successor_ == 0) {
      successor_ = member.target;
      successor_syncs_ = member.state == State::syncing;
    }
  }
}

// Ends or continues all jobs by the new role.
void Replica::regroup() {
  updates_.clear();
  asks_.clear();
  settled_seen_ = 0;
  answered_.clear();
  old_ = applies_.size() + (conclude_ != 0 ? 1 : 0);
  routing_op_ = next_op_;
  conclude_answer_ = 0;
  walk_ = Walk{};
  for (const ChunkId chunk : sorted_chunks()) regroup(*chunks_.find(chunk));
}

void Replica::regroup(Place& place) {
  Chunk& chunk = place.second;
  if (!serving() || !leased()) refuse_parked(place);
  auto job = chunk.jobs.begin();
  if (chunk.busy) ++job;
  while (job != chunk.jobs.end()) job = remove_at(place, job, Signal::routing);
  if (chunk.busy) {
    start_over(chunk.jobs.front());
    raise(place, Signal::routing);
  }
  if (!chunk.busy && serving() && chunk.pending != 0) make_inherited(place);
  proceed(place);
}

// Prepares a job for a new role: other replicas may have intact contents now.
void Replica::start_over(Job& job) {
  job.search = {.fetched = job.search.fetched};
  if (job::Outgoing* const outgoing = job.outgoing()) outgoing->paused = outgoing->as_is = false;
  if (auto* take = job.as<job::Take>()) take->as_is = false;
  if (job::Write* const write = job.write(); write != nullptr && !head()) refuse_clients(*write);
}

void Replica::make_inherited(Place& place) {
  Chunk& chunk = place.second;
  auto& write = *chunk.jobs.emplace_front(std::in_place_type<job::Inherited>).as<job::Inherited>();
  write.kind = chunk.removes ? Kind::remove : Kind::replace;
  write.whole = true;
  write.base = chunk.committed;
  write.version = chunk.pending;
  write.tag = chunk.tag;
  count(write);
  register_channel(write.tag, place.first);
  chunk.busy = true;
  raise(place, Signal::turn);
}

void Replica::on(const Lease& lease) {
  if (lease.runs && lease_) return;
  lease_ = lease.runs;
  lease_version_ = lease.version;
  if (leased()) return;
  for (const ChunkId id : sorted_chunks()) {
    Place& place = *chunks_.find(id);
    refuse_parked(place);
    for (auto job = place.second.jobs.begin(); job != place.second.jobs.end();) {
      if (job::Write* const write = job->write()) refuse_clients(*write);
      job = remove_at(place, job, Signal::lease_ended);
    }
    proceed(place);
  }
}

// Refuses everything from now on, because the store failed or differs from the chain.
void Replica::stop() {
  stopping_ = false;
  stopped_ = true;
  if (!failed_) {
    complete_ = false;
    act(Mark{});
  }
  role_ = State::offline;
  head_ = false;
  regroup();
  report_local_state();
}

void Replica::report_local_state() {
  LocalState now;
  const bool needs_contents = state_ == State::serving || state_ == State::recovering || state_ == State::lastsrv;
  if (failed_ || stopped_ || (!complete_ && needs_contents)) {
    now.state = Local::faulty;
  } else if (uptodate_ == chain_ && chain_ != 0) {
    now = {Local::uptodate, chain_};
  }
  if (now.state == local_.state && now.version == local_.version) return;
  local_ = now;
  act(now);
}

// ---- The store's answers, pauses, answers of other replicas -------------------------------------------------------

void Replica::on(const Applied& done) {
  if (done.op == conclude_ && conclude_ != 0) {
    concluded(done);
    return;
  }
  const auto found = applies_.find(done.op);
  if (found == applies_.end()) return;
  Place& place = *chunks_.find(found->second);
  applies_.erase(found);
  if (done.op < routing_op_) old_apply_ended();
  if (done.status == Status::io_error) {
    failed_ = stopping_ = true;
    raise(place, Signal::store_failed);
  } else {
    applied(place, done);
  }
  proceed(place);
}

// Marks the store again after the last Apply from before the routing: at a SYNCING target, such an Apply may have
// stored its tag after the first Mark, which forgot all tags.
void Replica::old_apply_ended() {
  if (--old_ == 0 && role_ == State::syncing) act(Mark{});
}

void Replica::on(const SendFailed& failed) {
  if (const auto update = updates_.find(failed.op); update != updates_.end()) {
    Place& place = *chunks_.find(update->second);
    raise(place, failed.status == Status::corrupt ? Signal::unreadable : Signal::unanswered);
    proceed(place);
    return;
  }
  const auto found = asks_.find(failed.op);
  if (found == asks_.end() || found->second.paused) return;
  if (found->second.ask == Ask::fetch) {
    Place& place = *chunks_.find(found->second.chunk);
    source_failed(place, true);
    proceed(place);
  } else {
    found->second.paused = true;
    act(Pause{failed.op});
  }
}

void Replica::on(const Retry& retry) {
  if (const auto update = updates_.find(retry.op); update != updates_.end()) {
    raise(*chunks_.find(update->second), Signal::retry);
    return;
  }
  const auto found = asks_.find(retry.op);
  if (found == asks_.end() || !found->second.paused) return;
  if (found->second.ask == Ask::fetch) {
    Place& place = *chunks_.find(found->second.chunk);
    raise(place, Signal::retry);
    proceed(place);
  } else {
    found->second.paused = false;
    ask_again(retry.op, found->second);
  }
}

void Replica::on(const Answer& told) {
  if (told.chain_version != chain_) return;  // may answer an op of an earlier incarnation
  if (const auto update = updates_.find(told.op); update != updates_.end()) {
    Place& place = *chunks_.find(update->second);
    raise(place, answer_signal(told.status));
    proceed(place);
    return;
  }
  const auto asked = asks_.find(told.op);
  if (asked == asks_.end()) return;
  if (asked->second.ask != Ask::sync_done || told.status != Status::ok) {
    on(SendFailed{told.op});
    return;
  }
  asks_.erase(asked);
  walk_.phase = Walk::Phase::done;
}

// Ends a step with the work that the event made possible elsewhere: a stop, held removals, the next part of a walk.
void Replica::settle() {
  if (stopping_) stop();
  std::vector<ChunkId> held;
  held.swap(held_);
  for (const ChunkId id : held) {
    const auto found = chunks_.find(id);
    if (found == chunks_.end() || !found->second.busy) continue;
    if (found->second.jobs.front().stage == Stage::held) raise(*found, Signal::check);
  }
  if (walk_.phase == Walk::Phase::compare) continue_sync();
  if (role_ == State::recovering) continue_recovery();
}

}  // namespace ff::fs3::replica
