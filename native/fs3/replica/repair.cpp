// Contents from another replica: for a chunk whose bytes fail their CRC, and for chunks that a RECOVERING target lacks.
#include <utility>

#include "fs3/replica/replica.hpp"

namespace ff::fs3::replica {

void Replica::on(const Damaged& damaged) {
  if (!serving()) return;
  Place& place = open(damaged.chunk);
  bool known = false;
  for (const Job& job : place.second.jobs) known = known || job.purpose == Purpose::repair;
  if (!known) {
    Job job;
    job.purpose = Purpose::repair;
    place.second.jobs.push_back(std::move(job));
  }
  proceed(place);
}

void Replica::begin_repair(Place& place) { place.second.committed != 0 ? fetch(place) : finish(place, Status::ok); }

// Returns the version whose whole contents the first job needs.
Version Replica::wanted(const Place& place) const {
  const Job& job = place.second.jobs.front();
  return job.purpose == Purpose::take || job.durable ? job.version : place.second.committed;
}

// Returns the CRC of the wanted version by the index: a dropped write may have had the same version number.
std::uint32_t Replica::wanted_crc(const Place& place) const {
  const Job& job = place.second.jobs.front();
  const Entry entry = job.purpose == Purpose::take ? job.seen : lookup_.entry(place.first);
  return entry.committed == wanted(place) ? entry.crc : entry.pending_crc;
}

// Returns the replicas that may have the contents, in the order in which they are asked. The SYNCING target is among
// them, so that its intact contents are never replaced by damaged contents from here.
std::vector<TargetId> Replica::sources(const Job& job) const {
  std::vector<TargetId> found;
  if (job.purpose == Purpose::take) found.push_back(job.peer);
  if (job.purpose == Purpose::take && job.as_is) return found;
  for (const Member& member : members_) {
    const bool may = job.purpose == Purpose::take ? member.state == State::lastsrv && member.target != job.peer
                                                  : member.state == State::serving || member.state == State::syncing;
    if (may && member.target != target_) found.push_back(member.target);
  }
  return found;
}

// Asks the next source. After the last one, gives up; or starts over after a pause if a source did not answer.
void Replica::fetch(Place& place) {
  Job& job = place.second.jobs.front();
  job.stage = Stage::fetching;
  job.paused = false;
  const std::vector<TargetId> from = sources(job);
  if (job.tried < from.size()) {
    ask(Ask::fetch, from[job.tried], place.first);
    return;
  }
  if (job.unanswered) {
    job.tried = 0;
    job.unanswered = false;
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

void Replica::fetch_failed(Place& place, bool unanswered) {
  Job& job = place.second.jobs.front();
  ++job.tried;
  job.unanswered = job.unanswered || unanswered;
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
  if (job.purpose == Purpose::take) {
    apply(place, true);
    return;
  }
  const Chunk& chunk = place.second;
  const Version version = wanted(place);
  const bool pending = version != chunk.committed;
  job.stage = Stage::replacing;
  job.op = next_op_++;
  applies_.emplace(job.op, place.first);
  act(Apply{job.op, place.first, chunk.committed, version, chain_, Kind::replace, !pending, true, 0, 0,
            pending ? chunk.tag : Tag{}, payload});
}

void Replica::contents_replaced(Place& place, Status status) {
  Job& job = place.second.jobs.front();
  release(job.fetched);
  ++job.refetches;
  if (status == Status::ok) {
    resume(place);
  } else if (status == Status::no_space && !job.durable) {
    finish(place, job.purpose == Purpose::client ? status : Status::ok);  // the intact copy still exists
  } else {
    give_up(place);
  }
}

// Continues the job after its contents were fetched.
void Replica::resume(Place& place) {
  Job& job = place.second.jobs.front();
  if (job.purpose == Purpose::repair) {
    finish(place, Status::ok);
  } else if (job.durable) {
    job.purpose == Purpose::sync && !serving() ? remove_front(place) : advance(place);
  } else if (head()) {
    apply(place);
  } else {
    remove_front(place);
  }
}

// Ends the search for contents: no replica has an intact copy.
void Replica::give_up(Place& place) {
  Job& job = place.second.jobs.front();
  if (job.purpose == Purpose::take) {
    if (std::exchange(job.as_is, true)) {
      finish(place, Status::ok);  // the other target no longer has the contents
    } else {
      job.tried = 0;
      fetch(place);
    }
    return;
  }
  const bool unacknowledged = job.purpose == Purpose::client
                                  ? job.durable && !job.left
                                  : job.purpose == Purpose::inherited && only_here_.contains(place.first);
  if (unacknowledged && !job.committed) {
    drop(place, Status::stale_routing);  // the client retries; intact contents of other replicas are not replaced
    return;
  }
  act(Unrepairable{place.first, wanted(place)});
  if (job.durable) {
    job.as_is = true;
    resume(place);
  } else {
    finish(place, job.purpose == Purpose::client ? Status::corrupt : Status::ok);
  }
}

}  // namespace ff::fs3::replica
