// A RECOVERING target collects the data that it lacks from the LASTSRV targets: contents first, then removals, then
// floors and tags.
#include <algorithm>

#include "fs3/replica/replica.hpp"

namespace ff::fs3::replica {

namespace {

Version newest(const Entry& entry) { return std::max(entry.committed, entry.pending); }

}  // namespace

void Replica::start_recovery() {
  walk_.phase = Walk::Phase::take;
  only_here_.clear();
  for (const Member& member : members_) {
    if (member.state == State::lastsrv) walk_.sources.push_back(member.target);
  }
  for (const auto& [id, chunk] : chunks_) {
    if (chunk.pending != 0 && !walk_.sources.empty()) only_here_.insert(id);
  }
}

void Replica::continue_recovery() {
  for (;;) {
    if (walk_.phase == Walk::Phase::done) return;
    if (walk_.phase == Walk::Phase::tags) {
      if (walk_.asking || conclude_ != 0) return;  // a Conclude of an older routing may still be in flight
      if (walk_.source < walk_.sources.size()) {
        ask(Ask::tags, walk_.sources[walk_.source]);
        return;
      }
      walk_.phase = Walk::Phase::done;
      uptodate_ = chain_;
      report_local_state();
      return;
    }
    start_differences();
    if (walk_.running > 0 || walk_.asking || !walk_.todo.empty()) return;
    if (walk_.source < walk_.sources.size() && !walk_.exhausted) {
      ask(Ask::page, walk_.sources[walk_.source]);
      return;
    }
    walk_.after = ChunkId{};
    walk_.exhausted = false;
    if (++walk_.source < walk_.sources.size()) continue;
    walk_.source = 0;
    walk_.phase = walk_.phase == Walk::Phase::take ? Walk::Phase::remove : Walk::Phase::tags;
  }
}

bool Replica::differs_for_recovery(const Entry* mine, const Entry* theirs) const {
  const Version here = mine != nullptr ? newest(*mine) : 0;
  if (walk_.phase == Walk::Phase::take) {
    if (theirs == nullptr || theirs->removes) return false;
    return newest(*theirs) > (here != 0 ? here : floor_);
  }
  if (theirs == nullptr) return here <= walk_.floor;
  return theirs->removes && theirs->pending > (here != 0 ? here : floor_);
}

job::Take Replica::take_of(const Entry& theirs) const {
  job::Take take;
  take.seen = theirs;
  take.chain = chain_;
  take.peer = walk_.sources[walk_.source];
  take.version = newest(theirs);
  if (walk_.phase == Walk::Phase::remove) {
    take.kind = Kind::remove;
    take.version = take.version == 0 ? walk_.floor : theirs.pending;
  }
  return take;
}

// Returns whether the version is still missing here. The job compares at its turn, because a write may have been in
// flight to the disk when the page was compared.
bool Replica::takes(const Chunk& chunk, const job::Take& take) const {
  const Version here = chunk.newest();
  const bool absent = newest(take.seen) == 0;
  if (take.kind == Kind::remove && absent) return here != 0 && here <= take.version;
  return take.version > (here != 0 ? here : floor_);  // without a chunk here, versions up to the floor count as removed
}

// Stores the tags of one LASTSRV member; the next member is asked when the Conclude has ended. The store stays marked
// as complete meanwhile.
void Replica::on(const Tags& tags) {
  Payload payload = tags.payload;
  const auto asked = asks_.find(tags.op);
  if (tags.chain_version != chain_ || asked == asks_.end() || asked->second.ask != Ask::tags) {
    release(payload);
    return;
  }
  asks_.erase(asked);
  floor_ = std::max(floor_, tags.floor);
  conclude_ = next_op_++;
  conclude_payload_ = payload;
  act(Conclude{conclude_, tags.floor, payload});
}

}  // namespace ff::fs3::replica
