// The predecessor's side of a sync: compares the SYNCING target's index with the predecessor's own, and sends the
// differences.
#include <algorithm>

#include "fs3/replica/replica.hpp"

namespace ff::fs3::replica {

// ---- Queries to other replicas (sync and recovery) ----------------------------------------------------------------

void Replica::ask(Ask query, TargetId to, ChunkId chunk) {
  const Op op = next_op_++;
  const Asked& asked = asks_[op] = {query, to, chunk, false};
  if (query != Ask::fetch) walk_.asking = true;
  ask_again(op, asked);
}

void Replica::ask_again(Op op, const Asked& asked) {
  switch (asked.ask) {
    case Ask::page: act(Send{asked.to, PageAsk{op, target_, chain_, walk_.after}}); break;
    case Ask::sync_done: act(Send{asked.to, SyncDone{op, target_, chain_, floor_, 0}}); break;
    case Ask::tags: act(Send{asked.to, TagsAsk{op, target_, chain_}}); break;
    case Ask::fetch: {
      Place& place = *chunks_.find(asked.chunk);
      Job& job = place.second.jobs.front();
      job.op = op;
      act(Send{asked.to, Fetch{op, target_, chain_, asked.chunk, wanted(place), as_is(job)}});
      break;
    }
  }
}

// Compares both indexes from walk_.after on, up to the end of the shorter page.
void Replica::on(const Page& page) {
  const auto asked = asks_.find(page.op);
  if (page.chain_version != chain_ || asked == asks_.end() || asked->second.ask != Ask::page) return;
  asks_.erase(asked);
  walk_.asking = false;
  walk_.floor = std::max<Version>(page.floor, 1);
  std::vector<Entry> own;
  lookup_.page(walk_.after, options_.page + 1, own);
  walk_.exhausted = !page.more && own.size() <= options_.page;
  ChunkId bound{~std::uint64_t{0}, ~std::uint32_t{0}};
  if (page.more) bound = page.entries.back().chunk;
  if (own.size() > options_.page) bound = std::min(bound, own[options_.page - 1].chunk);
  walk_.after = bound;
  auto mine = own.begin();
  auto theirs = page.entries.begin();
  for (;;) {
    const bool left = mine != own.end() && mine->chunk <= bound;
    const bool right = theirs != page.entries.end() && theirs->chunk <= bound;
    if (!left && !right) break;
    const bool use_mine = left && (!right || mine->chunk <= theirs->chunk);
    const bool use_theirs = right && (!left || theirs->chunk <= mine->chunk);
    const Entry* a = use_mine ? &*mine++ : nullptr;
    const Entry* b = use_theirs ? &*theirs++ : nullptr;
    if (a != nullptr && b != nullptr && a->pending != 0) {
      const bool has = a->pending == b->committed || a->pending == b->pending;
      if (has && a->pending_crc == (a->pending == b->committed ? b->crc : b->pending_crc)) only_here_.erase(a->chunk);
    }
    const bool differs = role_ == State::recovering ? differs_for_recovery(a, b) : differs_for_sync(a, b);
    if (differs) walk_.todo.push_back(b != nullptr ? *b : Entry{a->chunk});
  }
  std::reverse(walk_.todo.begin(), walk_.todo.end());
}

void Replica::start_differences() {
  while (walk_.running < options_.window && !walk_.todo.empty()) {
    const Entry theirs = walk_.todo.back();
    walk_.todo.pop_back();
    Place& place = open(theirs.chunk);
    ++walk_.running;
    if (role_ == State::recovering) {
      add<job::Take>(place.second.jobs) = take_of(theirs);
    } else {
      auto& sync = add<job::Sync>(place.second.jobs);
      sync.seen = theirs;
      sync.chain = chain_;
    }
    proceed(place);
  }
}

// ---- Sync --------------------------------------------------------------------------------------------------------

bool Replica::differs_for_sync(const Entry* mine, const Entry* theirs) const {
  if (mine != nullptr && chunks_.contains(mine->chunk)) return true;  // the sync job will decide
  if (mine == nullptr || theirs == nullptr) return true;
  return mine->committed != theirs->committed || mine->crc != theirs->crc || theirs->pending != 0;
}

// Returns whether both targets have the same version and contents of the chunk. The job compares again at its turn,
// because a write may have changed the chunk.
bool Replica::agrees(const Place& place, const job::Sync& sync) const {
  const Version committed = place.second.committed;
  if (committed == 0) return sync.seen.committed == 0 && sync.seen.pending == 0;
  const Entry now = lookup_.entry(place.first);
  const bool same = now.committed == committed && now.crc == sync.seen.crc;
  return same && sync.seen.committed == committed && sync.seen.pending == 0;
}

void Replica::send_difference(Place& place, Job& job) {
  const Version committed = place.second.committed;
  auto& sync = *job.as<job::Sync>();
  sync.kind = committed == 0 ? Kind::remove : Kind::replace;
  sync.version = committed == 0 ? floor_ : committed;
  sync.whole = sync.committed = true;
  send(place, job);
}

void Replica::continue_sync() {
  while (walk_.phase == Walk::Phase::compare) {
    start_differences();
    if (walk_.running > 0 || walk_.asking || !walk_.todo.empty()) return;
    if (!walk_.exhausted) {
      ask(Ask::page, successor_);
    } else if (!successor_lags()) {
      ask(Ask::sync_done, successor_);
    }
    return;
  }
}

// Returns whether a busy job has a committed version, or an Apply of one in flight, that the successor may lack. The
// Apply of a take can be in flight from an older routing.
bool Replica::successor_lags() const {
  return std::any_of(chunks_.begin(), chunks_.end(), [](const Place& place) {
    if (!place.second.busy) return false;
    const Job& job = place.second.jobs.front();
    const job::Outgoing* const outgoing = job.outgoing();
    return outgoing != nullptr ? outgoing->committed : job.kind() == JobKind::take;
  });
}

}  // namespace ff::fs3::replica
