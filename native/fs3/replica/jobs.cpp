// Jobs: their queues, and the conditions and actions of their transitions.
#include <algorithm>

#include "fs3/replica/replica.hpp"
#include "fs3/replica/transitions.hpp"

namespace ff::fs3::replica {

// ---- Transitions -------------------------------------------------------------------------------------------------

// Returns the transition of the job; null if it ignores the signal.
const Transition* Replica::transition(const Place& place, const Job& job, Signal signal) const {
  const JobKind kind = job.kind();
  const auto k = static_cast<std::size_t>(kind), s = static_cast<std::size_t>(job.stage);
  for (std::size_t i = table::kFirst[k][s][static_cast<std::size_t>(signal)]; i < table::kRows; ++i) {
    const Transition& row = table::kTransitions[i];
    if (!table::matches(row, kind, job.stage, signal)) continue;
    if (row.when == When::always || holds(row.when, place, job)) return &row;
  }
  return nullptr;
}

// Gives the chunk's first job a signal, then the signals that its actions raise. `status`: the answer of Do::refuse.
void Replica::raise(Place& place, Signal signal, Status status) {
  for (std::optional<Signal> next = signal; next.has_value();) {
    Job& job = place.second.jobs.front();
    const Transition* const row = transition(place, job, *next);
    if (row == nullptr) return;
    if (row->action != Do::stay && row->action != Do::pause && row->action != Do::send_again) withdraw(job);
    if (row->next != Stage::same) job.stage = row->next;
    next = perform(row->action, place, job, status);
  }
}

bool Replica::holds(When when, const Place& place, const Job& job) const {
  const auto version = [&job]() -> const job::Outgoing& { return *job.outgoing(); };
  switch (when) {
    case When::always: return true;
    case When::may_apply: return may_apply(version());
    case When::syncing: return role_ == State::syncing;
    case When::known: return known(place.second, version());
    case When::follows: return follows(place.second, *job.as<job::ForwardedUpdate>());
    case When::needless: return needless(place, job);
    case When::takes_removal: return job.as<job::Take>()->kind == Kind::remove;
    case When::serving: return serving();
    case When::head: return head();
    case When::has_successor: return serving() && successor_ != 0;
    case When::is_committed: return version().committed;
    case When::can_refetch: return job.search.refetches < kMostRefetches;
    case When::head_refetches: return job.search.refetches < kMostRefetches && head();
    case When::in_parts: return !version().whole && !successor_syncs_;
    case When::may_drop: return !version().committed && !successor_syncs_;
    case When::is_paused: return version().paused;
    case When::sent_as_is: return as_is(job);
    case When::unacknowledged: return !version().committed && unacknowledged(place, job);
  }
  return false;
}

std::optional<Signal> Replica::perform(Do action, Place& place, Job& job, Status status) {
  switch (action) {
    case Do::stay: break;
    case Do::number: number(place, *job.write()); return Signal::check;
    case Do::hold: held_.push_back(place.first); break;
    case Do::apply: apply(place, job, false); break;
    case Do::accept: accept(place, job); break;
    case Do::overwrite: overwrite(place, job); break;
    case Do::finish: finish(place, Status::ok); break;
    case Do::refuse: finish(place, status); break;
    case Do::diverge:
      stopping_ = true;
      finish(place, Status::diverged);
      break;
    case Do::cannot_follow: cannot_follow(place, job); break;
    case Do::leave: remove_front(place); break;
    case Do::advance: return Signal::durable;
    case Do::commit: commit(place, job); break;
    case Do::commit_everywhere:
      end_syncs(place);
      commit(place, job);
      break;
    case Do::send: send(place, job); break;
    case Do::send_difference: send_difference(place, job); break;
    case Do::send_whole:
      may_have_left(job);
      job.outgoing()->whole = true;
      send(place, job);
      break;
    case Do::send_again: resend(place, job); break;
    case Do::send_anew:
      if (job.stage == Stage::sending) may_have_left(job);
      return Signal::durable;
    case Do::pause:
      may_have_left(job);
      job.outgoing()->paused = true;
      act(Pause{job.op});
      break;
    case Do::fetch: return fetch(place, job);
    case Do::fetch_as_is:
      job.as<job::Take>()->as_is = true;
      job.search.tried = 0;
      return fetch(place, job);
    case Do::fetch_later: fetch_later(place, job); break;
    case Do::replace: replace(place, job); break;
    case Do::lack: return Signal::no_copy;
    case Do::drop_for_space: drop(place, job, Status::no_space); break;
    case Do::drop_damaged: drop(place, job, Status::stale_routing); break;
    case Do::dropped:
      place.second.pending = 0;
      finish(place, job.write()->outcome);
      break;
    case Do::send_damaged:
      report_damage(place);
      job.outgoing()->as_is = true;
      return Signal::durable;
    case Do::report_damage:
      report_damage(place);
      finish(place, Status::corrupt);
      break;
  }
  return std::nullopt;
}

bool Replica::needless(const Place& place, const Job& job) const {
  if (const auto* sync = job.as<job::Sync>()) return agrees(place, *sync);
  if (const auto* take = job.as<job::Take>()) return !takes(place.second, *take);
  return place.second.committed == 0;  // repair
}

bool Replica::as_is(const Job& job) const {
  const auto* take = job.as<job::Take>();
  return take != nullptr ? take->as_is : job.outgoing() != nullptr && job.outgoing()->as_is;
}

// Forgets the job's Update or Fetch: an answer that still arrives is ignored.
void Replica::withdraw(const Job& job) {
  if (job.stage == Stage::sending) {
    if (const auto update = updates_.find(job.op); update != updates_.end()) updates_.erase(update);
  } else if (job.stage == Stage::fetching || job.stage == Stage::fetching_base) {
    asks_.erase(job.op);
  }
}

// ---- Queues ------------------------------------------------------------------------------------------------------

std::vector<ChunkId> Replica::sorted_chunks() const {
  std::vector<ChunkId> ids;
  ids.reserve(chunks_.size());
  for (const auto& [id, chunk] : chunks_) ids.push_back(id);
  std::sort(ids.begin(), ids.end());
  return ids;
}

// Returns the chunk's state in memory. If there is none yet, makes it of the Lookup's entry.
Replica::Place& Replica::open(ChunkId id) {
  const auto [found, made] = chunks_.try_emplace(id);
  if (made) {
    const Entry entry = lookup_.entry(id);
    found->second.committed = entry.committed;
    found->second.length = entry.length;
  }
  return *found;
}

// Erases the chunk's state in memory if nothing is left to do.
void Replica::tidy(const Place& place) {
  const Chunk& chunk = place.second;
  if (chunk.jobs.empty() && chunk.pending == 0 && chunk.reads.empty()) chunks_.erase(chunks_.find(place.first));
}

void Replica::proceed(Place& place) {  // erases the place if nothing is left to do
  Chunk& chunk = place.second;
  while (!chunk.busy && !chunk.jobs.empty()) {
    chunk.busy = true;
    raise(place, Signal::turn);
  }
  tidy(place);
}

// Ends the first job: answers its clients and the predecessor.
void Replica::finish(Place& place, Status status) {
  Chunk& chunk = place.second;
  if (job::Write* const write = chunk.jobs.front().write()) {
    if (write->answer != 0 && write->chain == chain_) {
      answer(write->answer, predecessor_, chain_, status);
      answered_.emplace(write->answer, status);
    }
    for (const Op op : write->clients) {
      status == Status::ok ? reply(op, status, write->version, chunk.length) : reply(op, status);
    }
    write->clients.clear();
  }
  remove_front(place);
  if (chunk.pending == 0) serve_parked(place);
}

Replica::Jobs::iterator Replica::remove(Place& place, Jobs::iterator job) {
  Jobs& jobs = place.second.jobs;
  if (job == jobs.begin()) place.second.busy = false;
  withdraw(*job);
  forget_job(*job, place.first);
  return jobs.erase(job);
}

void Replica::remove_front(Place& place) { remove(place, place.second.jobs.begin()); }

// Removes a job, also a queued one, if its transition at this signal is Do::leave. Returns the next job.
Replica::Jobs::iterator Replica::remove_at(Place& place, Jobs::iterator job, Signal signal) {
  const Transition* const row = transition(place, *job, signal);
  return row != nullptr && row->action == Do::leave ? remove(place, job) : std::next(job);
}

void Replica::forget_job(Job& job, ChunkId chunk) {
  job::Write* const write = job.write();
  if (write != nullptr) refuse_clients(*write);
  if (job::Bytes* const bytes = job.bytes()) release(bytes->payload);
  release(job.search.fetched);
  if (write != nullptr) {
    uncount(*write);
    if (write->tag.client == 0) return;
    const auto mine = channels_.find({write->tag.client, write->tag.channel});
    if (mine != channels_.end() && mine->second.seq == write->tag.seq && mine->second.chunk == chunk) {
      channels_.erase(mine);
    }
    return;
  }
  const auto* sync = job.as<job::Sync>();
  const auto* take = job.as<job::Take>();
  const bool walks = (sync != nullptr && sync->chain == chain_) || (take != nullptr && take->chain == chain_);
  if (walks && walk_.running > 0) --walk_.running;
}

}  // namespace ff::fs3::replica
