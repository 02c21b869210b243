// Writes: of clients at the head, of the predecessor at the other targets.
#include <algorithm>

#include "fs3/replica/replica.hpp"

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
  Job job;
  job.kind = write.kind;
  job.offset = write.offset;
  job.length = write.length;
  job.tag = write.tag;
  job.payload = payload;
  job.clients.push_back(write.op);
  register_channel(job, place.first);
  place.second.jobs.push_back(std::move(job));
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
      if (job.tag != write.tag) continue;
      job.clients.push_back(write.op);
      return true;
    }
  }
  if (stored != write.tag.seq || known.tag.client == 0 || known.version == 0) return false;
  const Entry entry = lookup_.entry(known.chunk);
  reply(write.op, Status::ok, known.version, entry.length);
  return true;
}

void Replica::register_channel(const Job& job, ChunkId chunk) {
  if (job.tag.client == 0) return;
  Mine& mine = channels_[{job.tag.client, job.tag.channel}];
  if (job.tag.seq >= mine.seq) mine = {job.tag.seq, chunk};
}

void Replica::begin_client(Place& place) {
  Chunk& chunk = place.second;
  Job& job = chunk.jobs.front();
  job.base = chunk.committed;
  job.version = std::max(job.base, given_up_) + 1;
  if (job.base == 0) job.version = std::max({given_up_, floor_, removals_.empty() ? 0 : *removals_.rbegin()}) + 1;
  count(job);
  if (may_apply(job)) {
    apply(place);
  } else {
    job.stage = Stage::held;
    held_.push_back(place.first);
  }
}

void Replica::count(Job& job) {
  if (job.kind == Kind::remove) {
    removals_.insert(job.removes = job.version);
  } else if (job.base == 0) {
    creations_.insert(job.creates = job.version);
  }
}

// Returns false for a removal that must wait: its floor would cover the version of a creation in progress.
bool Replica::may_apply(const Job& job) const {
  return job.removes == 0 || creations_.empty() || *creations_.begin() > job.removes;
}

void Replica::refuse_clients(Job& job) {
  for (const Op op : job.clients) reply(op, Status::stale_routing);
  job.clients.clear();
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
    tidy(update.chunk);
    return;
  }
  Job job;
  job.purpose = Purpose::update;
  job.kind = update.kind;
  job.whole = update.kind == Kind::replace;
  job.forget = update.forget;
  job.offset = update.offset;
  job.length = update.length;
  job.base = update.base;
  job.version = update.version;
  job.tag = update.tag;
  job.payload = payload;
  job.answer = update.op;
  job.chain = chain_;
  place.second.jobs.push_back(std::move(job));
  proceed(place);
}

// Returns whether a job of this chunk will answer the update: a duplicate, or the same version from before the routing.
bool Replica::attach(Place& place, const Update& update) {
  Chunk& chunk = place.second;
  for (Job& job : chunk.jobs) {
    if (job.answer == update.op && job.chain == chain_) return true;
  }
  if (!chunk.busy || !serving() || update.forget) return false;
  Job& job = chunk.jobs.front();
  const bool write =
      job.purpose == Purpose::client || job.purpose == Purpose::update || job.purpose == Purpose::inherited;
  const bool versioned = job.durable || job.stage == Stage::applying || job.stage == Stage::dropping;
  if (!write || !versioned || job.version != update.version) return false;
  job.answer = update.op;
  job.chain = chain_;
  return true;
}

void Replica::begin_update(Place& place) {
  Chunk& chunk = place.second;
  Job& job = chunk.jobs.front();
  if (role_ == State::syncing) {
    if (!job.forget) count(job);
    register_channel(job, place.first);
    apply(place, true);
    return;
  }
  const bool gone = chunk.committed == 0 && job.base != 0 && job.kind == Kind::remove;
  if (job.version <= chunk.committed || gone) {
    finish(place, Status::ok);
  } else if (job.base == chunk.committed && chunk.pending == 0 && !job.forget) {
    count(job);
    register_channel(job, place.first);
    apply(place);
  } else {
    stopping_ = true;
    finish(place, Status::diverged);
  }
}

void Replica::answer(Op op, TargetId to, ChainVersion chain_version, Status status) {
  act(Send{to, Answer{op, target_, chain_version, status}});
}

// ---- Steps of a version: apply, send, commit ----------------------------------------------------------------------

void Replica::apply(Place& place, bool any_base) {
  Job& job = place.second.jobs.front();
  job.stage = Stage::applying;
  job.committed = any_base || successor_ == 0;
  job.op = next_op_++;
  applies_.emplace(job.op, place.first);
  const Payload payload = job.fetched != 0 ? job.fetched : job.payload;
  act(Apply{job.op, place.first, job.base, job.version, chain_, job.kind, job.committed,
            any_base || job.kind == Kind::replace, job.offset, job.length, job.tag, payload});
}

void Replica::applied(Place& place, const Applied& done) {
  Chunk& chunk = place.second;
  Job& job = chunk.jobs.front();
  if (job.stage == Stage::replacing) {
    contents_replaced(place, done.status);
    return;
  }
  if (job.stage == Stage::dropping) {
    chunk.pending = 0;
    finish(place, job.outcome);
    return;
  }
  if (done.status != Status::ok) {
    refused(place, done.status);
    return;
  }
  job.durable = true;
  const bool removes = job.kind == Kind::remove;
  if (job.committed) {
    chunk.pending = 0;
    set_committed(place, job.version, removes, done.length);
  } else {
    chunk.pending = job.version;
    chunk.pending_length = done.length;
    chunk.removes = removes;
    chunk.tag = job.tag;
  }
  advance(place);
}

// Handles an Apply that the store refused without a change.
void Replica::refused(Place& place, Status status) {
  Job& job = place.second.jobs.front();
  if (job.purpose == Purpose::take) {
    release(job.fetched);
    fetch_later(place);
  } else if (job.purpose == Purpose::client) {
    status == Status::corrupt&& job.refetches < kMostRefetches&& head() ? fetch(place) : finish(place, status);
  } else if (serving() && (status == Status::corrupt || status == Status::no_space)) {
    finish(place, status);
  } else {  // this target cannot follow the chain
    if (job.chain == chain_) stopping_ = true;
    remove_front(place);
  }
}

void Replica::set_committed(Place& place, Version version, bool removes, std::uint32_t length) {
  Chunk& chunk = place.second;
  chunk.committed = removes ? 0 : version;
  chunk.length = removes ? 0 : length;
  if (removes) floor_ = std::max(floor_, version);
}

// Continues the first job, whose version is durable here, by the present role.
void Replica::advance(Place& place) {
  Job& job = place.second.jobs.front();
  if (serving() && job.purpose != Purpose::take) {
    if (successor_ != 0) {
      send(place);
      return;
    }
    if (!job.committed) commit(place);
    finish(place, Status::ok);
  } else if (job.committed) {
    finish(place, Status::ok);
  } else {
    remove_front(place);
  }
}

void Replica::send(Place& place) {
  Job& job = place.second.jobs.front();
  job.stage = Stage::sending;
  job.op = next_op_++;
  updates_.emplace(job.op, place.first);
  resend(job.op);
}

void Replica::resend(Op op) {
  Place& place = *chunks_.find(updates_.find(op)->second);
  Job& job = place.second.jobs.front();
  job.paused = false;
  const bool whole = job.kind != Kind::remove && (job.whole || successor_syncs_);
  Update update;
  update.op = op;
  update.settled = updates_.begin()->first;
  update.from = target_;
  update.chain_version = chain_;
  update.chunk = place.first;
  update.base = job.base;
  update.version = job.version;
  update.kind = whole ? Kind::replace : job.kind;
  update.offset = whole ? 0 : job.offset;
  update.length = whole ? 0 : job.length;
  update.tag = job.tag;
  update.payload = whole ? 0 : job.payload;
  update.forget = job.forget;
  act(Send{successor_, update, job.as_is});
}

void Replica::commit(Place& place) {
  Chunk& chunk = place.second;
  act(Commit{place.first, chunk.pending});
  set_committed(place, chunk.pending, chunk.removes, chunk.pending_length);
  chunk.pending = 0;
  chunk.jobs.front().committed = true;
}

void Replica::acknowledged(Place& place) {
  Chunk& chunk = place.second;
  Job& job = chunk.jobs.front();
  if (job.purpose != Purpose::sync) {
    if (!job.committed) commit(place);
    // The successor has the same chunk, so waiting sync jobs are obsolete.
    for (auto other = std::next(chunk.jobs.begin()); other != chunk.jobs.end();) {
      if (other->purpose != Purpose::sync) {
        ++other;
        continue;
      }
      forget_job(*other, place.first);
      other = chunk.jobs.erase(other);
    }
  }
  finish(place, Status::ok);
}

// Drops the pending version. REQUIRES: no successor has it, and none will get it.
void Replica::drop(Place& place, Status status) {
  Job& job = place.second.jobs.front();
  job.stage = Stage::dropping;
  job.outcome = status;
  job.op = next_op_++;
  applies_.emplace(job.op, place.first);
  given_up_ = std::max(given_up_, place.second.pending);
  act(Drop{job.op, place.first, place.second.pending});
}

}  // namespace ff::fs3::replica
