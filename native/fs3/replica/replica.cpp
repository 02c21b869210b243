// Roles, the chunks' queues, and the effects of a new routing or lease.
#include "fs3/replica/replica.hpp"

#include <algorithm>

namespace ff::fs3::replica {

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
  bool behind = false;  // of this target, in the path
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
  while (job != chunk.jobs.end()) {
    const bool stays = job->purpose == Purpose::client ? head() : job->purpose == Purpose::repair && serving();
    if (stays) {
      ++job;
    } else {
      forget_job(*job, place.first);
      job = chunk.jobs.erase(job);
    }
  }
  if (chunk.busy) regroup_front(place);
  if (!chunk.busy && serving() && chunk.pending != 0) make_inherited(place);
  proceed(place);
}

void Replica::regroup_front(Place& place) {
  Job& job = place.second.jobs.front();
  job.paused = job.unanswered = false;
  job.as_is = false;  // other replicas may have intact contents now
  job.refetches = 0;
  job.tried = 0;
  if (!head()) refuse_clients(job);
  switch (job.stage) {
    case Stage::waiting:
    case Stage::applying:
    case Stage::replacing:
    case Stage::dropping: return;
    case Stage::held:
      if (!head()) remove_front(place);
      return;
    case Stage::fetching:
      if (!job.durable) {
        const bool stays = job.purpose == Purpose::client ? head() : job.purpose == Purpose::repair && serving();
        stays ? fetch(place) : remove_front(place);
        return;
      }
      break;
    case Stage::sending: job.left = true; break;
  }
  job.purpose == Purpose::sync || !serving() ? remove_front(place) : advance(place);
}

// Makes a job for a pending version that no job completes: it is from before a restart, or from another role.
void Replica::make_inherited(Place& place) {
  Chunk& chunk = place.second;
  Job job;
  job.purpose = Purpose::inherited;
  job.kind = chunk.removes ? Kind::remove : Kind::replace;
  job.whole = job.durable = true;
  job.base = chunk.committed;
  job.version = chunk.pending;
  job.tag = chunk.tag;
  count(job);
  register_channel(job, place.first);
  chunk.jobs.push_front(std::move(job));
  chunk.busy = true;
  advance(place);
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
      refuse_clients(*job);
      const bool begun =
          job->stage != Stage::waiting && job->stage != Stage::held && (job->stage != Stage::fetching || job->durable);
      if (job->purpose != Purpose::client || begun) {
        ++job;
        continue;
      }
      if (job == place.second.jobs.begin()) place.second.busy = false;
      if (job->op != 0) asks_.erase(job->op);
      forget_job(*job, id);
      job = place.second.jobs.erase(job);
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
    refuse_clients(place.second.jobs.front());
    remove_front(place);
  } else {
    applied(place, done);
  }
  proceed(place);
}

// Marks the store again after the last Apply from before the routing: at a SYNCING target, such an Apply may have kept
// its tag beyond the first Mark.
void Replica::old_apply_ended() {
  if (--old_ == 0 && role_ == State::syncing) act(Mark{});
}

void Replica::on(const SendFailed& failed) {
  if (const auto update = updates_.find(failed.op); update != updates_.end()) {
    Place& place = *chunks_.find(update->second);
    Job& job = place.second.jobs.front();
    if (job.paused) return;
    if (failed.status != Status::corrupt || job.as_is) {
      job.left = job.paused = true;
      pause(failed.op);
      return;
    }
    updates_.erase(update);
    if (job.refetches == kMostRefetches) {
      give_up(place);
    } else {
      fetch(place);
    }
    proceed(place);
    return;
  }
  const auto found = asks_.find(failed.op);
  if (found == asks_.end() || found->second.paused) return;
  if (found->second.ask == Ask::fetch) {
    Place& place = *chunks_.find(found->second.chunk);
    asks_.erase(found);
    fetch_failed(place, true);
    proceed(place);
  } else {
    found->second.paused = true;
    pause(failed.op);
  }
}

void Replica::on(const Retry& retry) {
  if (updates_.contains(retry.op)) {
    resend(retry.op);
    return;
  }
  const auto found = asks_.find(retry.op);
  if (found == asks_.end() || !found->second.paused) return;
  found->second.paused = false;
  if (found->second.ask == Ask::fetch) {
    Place& place = *chunks_.find(found->second.chunk);
    asks_.erase(found);
    fetch(place);
    proceed(place);
  } else {
    ask_again(retry.op, found->second);
  }
}

void Replica::on(const Answer& told) {
  if (told.chain_version != chain_) return;  // may answer an op of an earlier incarnation
  const auto update = updates_.find(told.op);
  if (update == updates_.end()) {
    const auto asked = asks_.find(told.op);
    if (asked == asks_.end()) return;
    if (asked->second.ask != Ask::sync_done || told.status != Status::ok) {
      on(SendFailed{told.op});
      return;
    }
    asks_.erase(asked);
    walk_.phase = Walk::Phase::done;
    return;
  }
  Place& place = *chunks_.find(update->second);
  Job& job = place.second.jobs.front();
  const bool whole = job.whole || successor_syncs_;
  job.left = true;
  if (told.status == Status::ok) {
    updates_.erase(update);
    acknowledged(place);
  } else if (told.status == Status::corrupt && !whole) {
    updates_.erase(update);
    job.whole = true;
    send(place);
  } else if (told.status == Status::no_space && !job.committed && !successor_syncs_) {
    updates_.erase(update);
    drop(place, Status::no_space);
  } else {
    on(SendFailed{told.op});
    return;
  }
  proceed(place);
}

// ---- Queues ------------------------------------------------------------------------------------------------------

std::vector<ChunkId> Replica::sorted_chunks() const {
  std::vector<ChunkId> ids;
  ids.reserve(chunks_.size());
  for (const auto& [id, chunk] : chunks_) ids.push_back(id);
  std::sort(ids.begin(), ids.end());
  return ids;
}

Replica::Place& Replica::open(ChunkId id) {
  const auto [found, made] = chunks_.try_emplace(id);
  if (made) {
    const Entry entry = lookup_.entry(id);
    found->second.committed = entry.committed;
    found->second.length = entry.length;
  }
  return *found;
}

void Replica::tidy(ChunkId id) {
  const auto found = chunks_.find(id);
  const Chunk& chunk = found->second;
  if (chunk.jobs.empty() && chunk.pending == 0 && chunk.reads.empty()) chunks_.erase(found);
}

void Replica::start(Place& place) {
  Chunk& chunk = place.second;
  while (!chunk.busy && !chunk.jobs.empty()) {
    chunk.busy = true;
    begin(place);
  }
}

void Replica::proceed(Place& place) {  // may remove the place
  start(place);
  tidy(place.first);
}

void Replica::begin(Place& place) {
  switch (place.second.jobs.front().purpose) {
    case Purpose::client: begin_client(place); break;
    case Purpose::update: begin_update(place); break;
    case Purpose::inherited: break;  // an inherited job is busy from the start
    case Purpose::sync: begin_sync(place); break;
    case Purpose::take: begin_take(place); break;
    case Purpose::repair: begin_repair(place); break;
  }
}

// Ends the first job and answers its clients and its predecessor.
void Replica::finish(Place& place, Status status) {
  Chunk& chunk = place.second;
  Job& job = chunk.jobs.front();
  if (job.answer != 0 && job.chain == chain_) {
    answer(job.answer, predecessor_, chain_, status);
    answered_.emplace(job.answer, status);
  }
  for (const Op op : job.clients) {
    status == Status::ok ? reply(op, status, job.version, chunk.length) : reply(op, status);
  }
  job.clients.clear();
  remove_front(place);
  if (chunk.pending == 0) serve_parked(place);
}

void Replica::remove_front(Place& place) {
  forget_job(place.second.jobs.front(), place.first);
  place.second.jobs.pop_front();
  place.second.busy = false;
}

void Replica::forget_job(Job& job, ChunkId chunk) {
  refuse_clients(job);
  release(job.payload);
  release(job.fetched);
  if (job.creates != 0) creations_.erase(creations_.find(job.creates));
  if (job.removes != 0) removals_.erase(removals_.find(job.removes));
  if (job.tag.client != 0) {
    const auto mine = channels_.find({job.tag.client, job.tag.channel});
    if (mine != channels_.end() && mine->second.seq == job.tag.seq && mine->second.chunk == chunk) {
      channels_.erase(mine);
    }
  }
  const bool walks = job.purpose == Purpose::sync || job.purpose == Purpose::take;
  if (walks && job.chain == chain_ && walk_.running > 0) --walk_.running;
}

// Does the work of a step beyond the step's own chunk.
void Replica::settle() {
  if (stopping_) stop();
  std::vector<ChunkId> held;
  held.swap(held_);
  for (const ChunkId id : held) {
    const auto found = chunks_.find(id);
    if (found == chunks_.end() || !found->second.busy) continue;
    const Job& job = found->second.jobs.front();
    if (job.stage != Stage::held) continue;
    if (may_apply(job)) {
      apply(*found);
    } else {
      held_.push_back(id);
    }
  }
  if (walk_.phase == Walk::Phase::compare) continue_sync();
  if (role_ == State::recovering) continue_recovery();
}

}  // namespace ff::fs3::replica
