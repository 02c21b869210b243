// Contents from another replica: for a chunk whose bytes fail their CRC, and for chunks that a RECOVERING target lacks.
#include "fs3/replica/replica.hpp"
#include "fs3/replica/transitions.hpp"

namespace ff::fs3::replica {

void Replica::on(const Damaged& damaged) {
  if (!serving()) return;
  Place& place = open(damaged.chunk);
  bool known = false;
  for (const Job& job : place.second.jobs) known = known || job.kind() == JobKind::repair;
  if (!known) add<job::Repair>(place.second.jobs);
  proceed(place);
}

// Returns whether a job in this stage works on its own version, and not on the committed version on which it builds.
bool Replica::sends(Stage stage) {
  return stage == Stage::sending || stage == Stage::fetching || stage == Stage::replacing;
}

Version Replica::version_of(const Job& job) {
  const job::Outgoing* const outgoing = job.outgoing();
  return outgoing != nullptr ? outgoing->version : job.as<job::Take>()->version;
}

// Returns the version whose whole contents the first job needs.
Version Replica::wanted(const Place& place) const {
  const Job& job = place.second.jobs.front();
  return sends(job.stage) ? version_of(job) : place.second.committed;
}

// Returns the CRC of the wanted version in the index here, or of a take in its peer's entry. Fetched contents must have
// it, because another target may hold a write with the same number that the chain gave up.
std::uint32_t Replica::wanted_crc(const Place& place) const {
  const auto* take = place.second.jobs.front().as<job::Take>();
  const Entry entry = take != nullptr ? take->seen : lookup_.entry(place.first);
  return entry.committed == wanted(place) ? entry.crc : entry.pending_crc;
}

// Returns the replicas that may have the contents, in the order in which they are asked. The SYNCING target is among
// them, so that its intact contents are never replaced by damaged contents from here.
std::vector<TargetId> Replica::sources(const Job& job) const {
  const auto* take = job.as<job::Take>();
  std::vector<TargetId> found;
  if (take != nullptr) found.push_back(take->peer);
  if (take != nullptr && take->as_is) return found;
  for (const Member& member : members_) {
    const bool may = take != nullptr ? member.state == State::lastsrv && member.target != take->peer
                                     : member.state == State::serving || member.state == State::syncing;
    if (may && member.target != target_) found.push_back(member.target);
  }
  return found;
}

// Asks the next source. After the last one, gives up; or starts over after a pause if a source did not answer.
std::optional<Signal> Replica::fetch(Place& place, Job& job) {
  const std::vector<TargetId> from = sources(job);
  if (job.search.tried < from.size()) {
    ask(Ask::fetch, from[job.search.tried], place.first);
    return std::nullopt;
  }
  if (!job.search.unanswered) return Signal::no_copy;
  job.search.tried = 0;
  job.search.unanswered = false;
  fetch_later(place, job);
  return std::nullopt;
}

void Replica::fetch_later(Place& place, Job& job) {
  release(job.search.fetched);
  job.op = next_op_++;
  asks_[job.op] = {Ask::fetch, 0, place.first, true};
  act(Pause{job.op});
}

void Replica::source_failed(Place& place, bool unanswered) {
  Search& search = place.second.jobs.front().search;
  ++search.tried;
  search.unanswered = search.unanswered || unanswered;
  raise(place, Signal::next_source);
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
  if (fetched.status == Status::ok && fetched.crc == wanted_crc(place)) {
    place.second.jobs.front().search.fetched = payload;
    raise(place, Signal::contents);
    return;
  }
  release(payload);
  source_failed(place, false);
  proceed(place);
}

// Stores fetched contents over the damaged ones of the same version.
void Replica::replace(Place& place, Job& job) {
  const Chunk& chunk = place.second;
  const Version version = wanted(place);
  const bool pending = version != chunk.committed;
  act(Apply{new_apply(place, job), place.first, chunk.committed, version, chain_, Kind::replace, !pending, true, 0, 0,
            pending ? chunk.tag : Tag{}, job.search.fetched});
}

void Replica::report_damage(const Place& place) { act(Unrepairable{place.first, wanted(place)}); }

// Returns whether no client was told of the job's version and no other target has it. Such a version is dropped: the
// client retries, and intact contents of other replicas are not replaced.
bool Replica::unacknowledged(const Place& place, const Job& job) const {
  const auto* client = job.as<job::ClientWrite>();
  return client != nullptr ? !client->left : only_here_.contains(place.first);
}

}  // namespace ff::fs3::replica
