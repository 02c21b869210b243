// Writes: from clients at the head, and from the predecessor at the other targets.
#include <algorithm>

#include "fs3/replica/replica.hpp"
#include "fs3/replica/transitions.hpp"

namespace ff::fs3::replica {

// ---- At the head -------------------------------------------------------------------------------------------------

void Replica::on(const ClientWrite& write) {
  Payload payload = write.payload;
  if (!head() || write.chain_version != chain_) {
    reply(write.op, Status::stale_routing);
    release(payload);
    return;
  }
  if (write.tag.client != 0 && answered_by_tag(write)) {
    release(payload);
    return;
  }
  Place& place = open(write.chunk);
  auto& made = add<job::ClientWrite>(place.second.jobs);
  made.kind = write.kind;
  made.bytes = {write.offset, write.length, payload};
  made.tag = write.tag;
  made.clients.push_back(write.op);
  register_channel(made.tag, place.first);
  proceed(place);
}

bool Replica::answered_by_tag(const ClientWrite& write) {
  const auto mine = channels_.find({write.tag.client, write.tag.channel});
  const Tagged known = lookup_.tag(write.tag.client, write.tag.channel);
  const std::uint64_t stored = known.tag.client != 0 ? known.tag.seq : 0;
  const std::uint64_t newest = std::max(stored, mine != channels_.end() ? mine->second.seq : 0);
  if (write.tag.seq < newest) {
    reply(write.op, Status::duplicate);
    return true;
  }
  if (mine != channels_.end() && mine->second.seq == write.tag.seq) {
    for (Job& job : chunks_.find(mine->second.chunk)->second.jobs) {
      job::Write* const same = job.write();
      if (same == nullptr || same->tag != write.tag) continue;
      same->clients.push_back(write.op);
      return true;
    }
  }
  if (stored != write.tag.seq || known.tag.client == 0 || known.version == 0) return false;
  const Entry entry = lookup_.entry(known.chunk);
  reply(write.op, Status::ok, known.version, entry.length);
  return true;
}

void Replica::register_channel(const Tag& tag, ChunkId chunk) {
  if (tag.client == 0) return;
  Mine& mine = channels_[{tag.client, tag.channel}];
  if (tag.seq >= mine.seq) mine = {tag.seq, chunk};
}

void Replica::number(const Place& place, job::Write& write) {
  write.base = place.second.committed;
  write.version = std::max(write.base, given_up_) + 1;
  if (write.base == 0) {
    write.version = std::max({given_up_, floor_, removals_.empty() ? 0 : *removals_.rbegin()}) + 1;
  }
  count(write);
}

void Replica::count(job::Write& write) {
  write.counted = write.kind == Kind::remove || write.base == 0;
  if (write.counted) (write.kind == Kind::remove ? removals_ : creations_).insert(write.version);
}

void Replica::uncount(job::Write& write) {
  if (!write.counted) return;
  std::multiset<Version>& versions = write.kind == Kind::remove ? removals_ : creations_;
  versions.erase(versions.find(write.version));
}

// Returns false for a removal that must wait. A removal raises the floor to its version, and a creation in progress
// with a version up to the floor would count as removed.
bool Replica::may_apply(const job::Outgoing& write) const {
  return write.kind != Kind::remove || creations_.empty() || *creations_.begin() > write.version;
}

void Replica::refuse_clients(job::Write& write) {
  for (const Op op : write.clients) reply(op, Status::stale_routing);
  write.clients.clear();
}

// ---- From the predecessor ----------------------------------------------------------------------------------------

void Replica::on(const Update& update) {
  Payload payload = update.payload;
  const bool follows = serving() || (role_ == State::syncing && old_ == 0);
  if (!follows || update.chain_version != chain_ || update.from != predecessor_) {
    answer(update.op, update.from, update.chain_version, Status::stale_routing);
    release(payload);
    return;
  }
  if (update.op < settled_seen_) {
    release(payload);
    return;
  }
  settled_seen_ = std::max(settled_seen_, update.settled);
  answered_.erase(answered_.begin(), answered_.lower_bound(settled_seen_));
  if (const auto answered = answered_.find(update.op); answered != answered_.end()) {
    answer(update.op, update.from, chain_, answered->second);
    release(payload);
    return;
  }
  Place& place = open(update.chunk);
  if (attach(place, update)) {
    release(payload);
    tidy(place);
    return;
  }
  auto& made = add<job::ForwardedUpdate>(place.second.jobs);
  made.kind = update.kind;
  made.whole = update.kind == Kind::replace;
  made.forget = update.forget;
  made.bytes = {update.offset, update.length, payload};
  made.base = update.base;
  made.version = update.version;
  made.tag = update.tag;
  made.answer = update.op;
  made.chain = chain_;
  proceed(place);
}

// Returns whether a job of this chunk will answer the Update, so that no new job is needed. Either the Update is a
// duplicate, or the job in progress completes the same version, which arrived under an earlier routing.
bool Replica::attach(Place& place, const Update& update) {
  Chunk& chunk = place.second;
  for (const Job& job : chunk.jobs) {
    const job::Write* const write = job.write();
    if (write != nullptr && write->answer == update.op && write->chain == chain_) return true;
  }
  if (!chunk.busy || !serving() || update.forget) return false;
  Job& job = chunk.jobs.front();
  job::Write* const write = job.write();
  const bool begun = job.stage == Stage::applying || job.stage == Stage::dropping || sends(job.stage);
  if (write == nullptr || !begun || write->version != update.version) return false;
  write->answer = update.op;
  write->chain = chain_;
  return true;
}

bool Replica::known(const Chunk& chunk, const job::Outgoing& update) const {
  const bool gone = chunk.committed == 0 && update.base != 0 && update.kind == Kind::remove;
  return update.version <= chunk.committed || gone;
}

bool Replica::follows(const Chunk& chunk, const job::ForwardedUpdate& update) const {
  return update.base == chunk.committed && chunk.pending == 0 && !update.forget;
}

void Replica::answer(Op op, TargetId to, ChainVersion chain_version, Status status) {
  act(Send{to, Answer{op, target_, chain_version, status}});
}

// ---- Steps of a version: apply, send, commit ----------------------------------------------------------------------

Op Replica::new_apply(const Place& place, Job& job) {
  job.op = next_op_++;
  applies_.emplace(job.op, place.first);
  return job.op;
}

// Begins the Apply of a job that came with bytes.
void Replica::apply(Place& place, Job& job, bool any_base) {
  job::Write& write = *job.write();
  const job::Bytes& bytes = *job.bytes();
  write.committed = any_base || successor_ == 0;
  act(Apply{new_apply(place, job), place.first, write.base, write.version, chain_, write.kind, write.committed,
            any_base || write.kind == Kind::replace, bytes.offset, bytes.length, write.tag, bytes.payload});
}

void Replica::accept(Place& place, Job& job) {
  job::Write& write = *job.write();
  count(write);
  register_channel(write.tag, place.first);
  apply(place, job, false);
}

// Makes the job's version the committed one, whatever the chunk is here.
void Replica::overwrite(Place& place, Job& job) {
  if (const auto* take = job.as<job::Take>()) {
    act(Apply{new_apply(place, job), place.first, 0, take->version, chain_, take->kind, true, true, 0, 0, Tag{},
              job.search.fetched});
    return;
  }
  auto& update = *job.as<job::ForwardedUpdate>();
  if (!update.forget) count(update);
  register_channel(update.tag, place.first);
  apply(place, job, true);
}

// Handles the store's outcome of an Apply or Drop.
void Replica::applied(Place& place, const Applied& done) {
  Job& job = place.second.jobs.front();
  if (job.stage == Stage::replacing || job.stage == Stage::replacing_base) {
    release(job.search.fetched);
    ++job.search.refetches;
  } else if (job.stage == Stage::applying && done.status == Status::ok) {
    record(place, job, done.length);
  }
  switch (done.status) {
    case Status::ok: raise(place, Signal::applied, done.status); break;
    case Status::no_space: raise(place, Signal::no_space, done.status); break;
    case Status::corrupt: raise(place, Signal::corrupt, done.status); break;
    default: raise(place, Signal::refused, done.status); break;
  }
}

// Records the version of a durable Apply in the chunk's state.
void Replica::record(Place& place, const Job& job, std::uint32_t length) {
  Chunk& chunk = place.second;
  const job::Write* const write = job.write();
  if (write != nullptr && !write->committed) {
    chunk.pending = write->version;
    chunk.pending_length = length;
    chunk.removes = write->kind == Kind::remove;
    chunk.tag = write->tag;
    return;
  }
  const Kind kind = write != nullptr ? write->kind : job.as<job::Take>()->kind;
  chunk.pending = 0;
  set_committed(place, version_of(job), kind == Kind::remove, length);
}

void Replica::set_committed(Place& place, Version version, bool removes, std::uint32_t length) {
  Chunk& chunk = place.second;
  chunk.committed = removes ? 0 : version;
  chunk.length = removes ? 0 : length;
  if (removes) floor_ = std::max(floor_, version);
}

// Ends an Update that the store refused.
void Replica::cannot_follow(Place& place, const Job& job) {
  if (job.write()->chain == chain_) stopping_ = true;
  remove_front(place);
}

void Replica::send(Place& place, Job& job) {
  job.op = next_op_++;
  updates_.emplace(job.op, place.first);
  resend(place, job);
}

void Replica::resend(Place& place, Job& job) {
  job::Outgoing& version = *job.outgoing();
  version.paused = false;
  const bool whole = version.kind != Kind::remove && (version.whole || successor_syncs_);
  Update update;
  update.op = job.op;
  update.settled = updates_.begin()->first;
  update.from = target_;
  update.chain_version = chain_;
  update.chunk = place.first;
  update.base = version.base;
  update.version = version.version;
  update.kind = whole ? Kind::replace : version.kind;
  if (const job::Bytes* const bytes = job.bytes(); bytes != nullptr && !whole) {
    update.offset = bytes->offset;
    update.length = bytes->length;
    update.payload = bytes->payload;
  }
  if (const job::Write* const write = job.write()) update.tag = write->tag;
  const auto* forwarded = job.as<job::ForwardedUpdate>();
  update.forget = forwarded != nullptr ? forwarded->forget : job.as<job::Sync>() != nullptr && !whole;
  act(Send{successor_, update, version.as_is});
}

void Replica::may_have_left(Job& job) {
  if (auto* client = job.as<job::ClientWrite>()) client->left = true;
}

// Ends a job whose version is durable at all targets behind this one. Commits the version if it is pending.
void Replica::commit(Place& place, const Job& job) {
  Chunk& chunk = place.second;
  if (!job.outgoing()->committed) {
    act(Commit{place.first, chunk.pending});
    set_committed(place, chunk.pending, chunk.removes, chunk.pending_length);
    chunk.pending = 0;
  }
  finish(place, Status::ok);
}

// Removes the waiting sync jobs of a chunk whose newest version the successor has acknowledged.
void Replica::end_syncs(Place& place) {
  Jobs& jobs = place.second.jobs;
  for (auto job = std::next(jobs.begin()); job != jobs.end();) {
    job = job->kind() == JobKind::sync ? remove(place, job) : std::next(job);
  }
}

// Drops the pending version. REQUIRES: no target behind this one has the version, and none will get it.
void Replica::drop(Place& place, Job& job, Status outcome) {
  job.write()->outcome = outcome;
  given_up_ = std::max(given_up_, place.second.pending);
  act(Drop{new_apply(place, job), place.first, place.second.pending});
}

}  // namespace ff::fs3::replica
