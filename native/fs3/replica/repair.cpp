// Contents from another replica: for a chunk whose bytes fail their CRC, and for what a RECOVERING target lacks.
#include <utility>

#include "fs3/replica/replica.hpp"

namespace ff::fs3::replica {

void Replica::on(const Damaged& damaged) {
  if (!serving()) return;
  Place& place = open(damaged.chunk);
  bool known = false;
  for (const Job& job : place.second.jobs) known = known || job.what == What::repair;
  if (!known) {
    Job job;
    job.what = What::repair;
    place.second.jobs.push_back(std::move(job));
  }
  proceed(place);
}

void Replica::begin_repair(Place& place) {
  place.second.committed != 0 ? fetch(place) : finish(place, Status::ok);
}

// The version that the first job needs whole.
Version Replica::wanted(const Place& place) const {
  const Job& job = place.second.jobs.front();
  return job.what == What::take || job.durable ? job.version : place.second.committed;
}

// Its CRC by the index: an equal number may be another version's, of a write that the chain gave up.
std::uint32_t Replica::wanted_crc(const Place& place) const {
  const Job& job = place.second.jobs.front();
  const Entry entry = job.what == What::take ? job.seen : lookup_.entry(place.first);
  return entry.committed == wanted(place) ? entry.crc : entry.pending_crc;
}

// Who may have it, in the order of asking. The SYNCING target is among them, so that what it has whole is never replaced by
// what is damaged here.
std::vector<TargetId> Replica::sources(const Job& job) const {
  std::vector<TargetId> found;
  if (job.what == What::take) found.push_back(job.peer);
  if (job.what == What::take && job.as_is) return found;
  for (const Member& member : members_) {
    const bool may = job.what == What::take ? member.state == State::lastsrv && member.target != job.peer
                                            : member.state == State::serving || member.state == State::syncing;
    if (may && member.target != target_) found.push_back(member.target);
  }
  return found;
}

// Asks the next source; after the last, gives up, or starts over later if one did not answer.
void Replica::fetch(Place& place) {
  Job& job = place.second.jobs.front();
  job.stage = Stage::fetching;
  job.paused = false;
  const std::vector<TargetId> from = sources(job);
  if (job.tried < from.size()) {
    ask(Ask::fetch, from[job.tried], place.first);
    return;
  }
  if (job.unsure) {
    job.tried = 0;
    job.unsure = false;
    fetch_later(place);
  } else {
    give_up(place);
  }
}

void Replica::fetch_later(Place& place) {
  Job& job = place.second.jobs.front();
  job.stage = Stage::fetching;
  job.op = next_op_++;
  asks_[job.op] = {Ask::fetch, 0, place.first, true};
  pause(job.op);
}

void Replica::fetch_failed(Place& place, bool unsure) {
  Job& job = place.second.jobs.front();
  ++job.tried;
  job.unsure = job.unsure || unsure;
  fetch(place);
}

void Replica::on(const Fetched& fetched) {
  Payload payload = fetched.payload;
  const auto asked = asks_.find(fetched.op);
  if (fetched.chain_version != chain_ || asked == asks_.end() || asked->second.ask != Ask::fetch ||
      asked->second.paused) {
    release(payload);
    return;
  }
  Place& place = *chunks_.find(asked->second.chunk);
  Job& job = place.second.jobs.front();
  asks_.erase(asked);
  if (fetched.status != Status::ok || fetched.crc != wanted_crc(place)) {
    release(payload);
    fetch_failed(place, false);
    proceed(place);
    return;
  }
  job.fetched = payload;
  if (job.what == What::take) {
    apply(place, true);
    return;
  }
  const Chunk& chunk = place.second;
  const Version version = wanted(place);
  const bool pending = version != chunk.committed;
  job.stage = Stage::mending;
  job.op = next_op_++;
  applies_.emplace(job.op, place.first);
  act(Apply{job.op, place.first, chunk.committed, version, chain_, Kind::replace, !pending, true, 0, 0,
            pending ? chunk.tag : Tag{}, payload});
}

void Replica::mended(Place& place, Status status) {
  Job& job = place.second.jobs.front();
  release(job.fetched);
  ++job.mends;
  if (status == Status::ok) {
    resume(place);
  } else if (status == Status::no_space && !job.durable) {
    finish(place, job.what == What::client ? status : Status::ok);  // the good copy is still there
  } else {
    give_up(place);
  }
}

// What the job was about before its contents had to be fetched.
void Replica::resume(Place& place) {
  Job& job = place.second.jobs.front();
  if (job.what == What::repair) {
    finish(place, Status::ok);
  } else if (job.durable) {
    job.what == What::sync && !serving() ? remove_front(place) : advance(place);
  } else if (head()) {
    apply(place);
  } else {
    remove_front(place);
  }
}

// No good copy is to be had.
void Replica::give_up(Place& place) {
  Job& job = place.second.jobs.front();
  if (job.what == What::take) {
    if (std::exchange(job.as_is, true)) {
      finish(place, Status::ok);  // the other does not have it any more
    } else {
      job.tried = 0;
      fetch(place);
    }
    return;
  }
  const bool nobodys = job.what == What::client ? job.durable && !job.left
                                                : job.what == What::inherited && alone_.contains(place.first);
  if (nobodys && !job.committed) {
    drop(place, Status::stale_routing);  // its client writes again; what others have whole is not replaced by it
    return;
  }
  act(Unrepairable{place.first, wanted(place)});
  if (job.durable) {
    job.as_is = true;
    resume(place);
  } else {
    finish(place, job.what == What::client ? Status::corrupt : Status::ok);
  }
}

}  // namespace ff::fs3::replica
