#include "fs3/replica/simulation/map_store.hpp"

#include <algorithm>

namespace ff::fs3::replica {

namespace { constexpr std::size_t kPast = 3; }  // namespace

MapStore::Value MapStore::combine(Value before, Value written) {
  Value z = before * 0x9e3779b97f4a7c15ull + written + 1;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return (z ^ (z >> 31)) | 1;
}

std::vector<Applied> MapStore::apply(const Apply& apply, Value written, bool bad) {
  const auto found = now_.chunks.find(apply.chunk);
  const Kept kept = found != now_.chunks.end() ? found->second : Kept{};
  const bool removes = apply.kind == Kind::remove;
  if (!apply.any_base) {
    if (kept.committed.version != apply.base || kept.pending.version != 0) return {{apply.op, Status::diverged, 0}};
    if (kept.committed.bad && !removes) return {{apply.op, Status::corrupt, 0}};
  }
  if (full_ && !removes) return {{apply.op, Status::no_space, 0}};
  const Value whole = apply.kind == Kind::replace ? written : combine(kept.committed.value, written);
  log_.emplace_back(std::in_place_type<Write>, apply, removes ? 0 : whole, bad && !removes);
  return {};
}

void MapStore::commit(const Commit& commit) {
  replay(now_, Record(std::in_place_type<Commit>, commit));
  log_.emplace_back(std::in_place_type<Commit>, commit);
}

void MapStore::drop(const Drop& drop) { log_.emplace_back(std::in_place_type<Drop>, drop); }

void MapStore::mark() {
  replay(now_, Record(std::in_place_type<Mark>));
  log_.emplace_back(std::in_place_type<Mark>);
}

void MapStore::conclude(const Conclude& conclude, std::vector<Tagged> tags) {
  log_.emplace_back(std::in_place_type<Concluding>, conclude, std::move(tags));
}

std::vector<Applied> MapStore::sync() {
  if (log_.empty()) return {};
  past_.push_back(durable_);
  if (past_.size() > kPast) past_.erase(past_.begin());
  std::vector<Applied> done;
  for (const Record& record : log_) {
    replay(durable_, record);
    if (const auto* write = std::get_if<Write>(&record)) done.push_back({write->apply.op, Status::ok, 1});
    if (const auto* dropped = std::get_if<Drop>(&record)) done.push_back({dropped->op, Status::ok, 0});
    if (const auto* ended = std::get_if<Concluding>(&record)) done.push_back({ended->conclude.op, Status::ok, 0});
  }
  log_.clear();
  now_ = durable_;
  return done;
}

void MapStore::power_cut(std::size_t lost, std::size_t synced) {
  if (synced > 0 && synced <= past_.size()) {
    durable_ = past_[past_.size() - synced];
    log_.clear();
  }
  for (std::size_t i = 0; i + lost < log_.size(); ++i) replay(durable_, log_[i]);
  log_.clear();
  past_.clear();
  now_ = durable_;
}

void MapStore::keep(Image& image, const Tagged& tagged) {
  if (tagged.tag.client == 0) return;
  Tagged& known = image.tags[{tagged.tag.client, tagged.tag.channel}];
  const bool newer = tagged.tag.seq > known.tag.seq || known.tag.client == 0;
  if (newer || (tagged.tag.seq == known.tag.seq && tagged.version > known.version)) known = tagged;
}

void MapStore::replay(Image& image, const Record& record) {
  if (const auto* write = std::get_if<Write>(&record)) {
    const Apply& apply = write->apply;
    Kept& kept = image.chunks[apply.chunk];
    const bool removes = apply.kind == Kind::remove;
    keep(image, {apply.tag, apply.chunk, apply.version});
    if (!apply.committed) {
      kept.pending = {apply.version, write->value, removes, write->bad};
      kept.tag = apply.tag;
      return;
    }
    kept = {{apply.version, write->value, removes, write->bad}, {}, {}};
    if (!removes) return;
    image.floor = std::max(image.floor, apply.version);
    image.chunks.erase(apply.chunk);
  } else if (const auto* commit = std::get_if<Commit>(&record)) {
    Kept& kept = image.chunks[commit->chunk];
    if (kept.pending.version != commit->version) return;
    if (kept.pending.removes) {
      image.floor = std::max(image.floor, commit->version);
      image.chunks.erase(commit->chunk);
    } else {
      kept = {kept.pending, {}, {}};
    }
  } else if (const auto* drop = std::get_if<Drop>(&record)) {
    Kept& kept = image.chunks[drop->chunk];
    if (kept.tag.client != 0) {
      Tagged& known = image.tags[{kept.tag.client, kept.tag.channel}];
      if (known.tag == kept.tag) known.version = 0;
    }
    kept.pending = {};
    if (kept.committed.version == 0) image.chunks.erase(drop->chunk);
  } else if (std::holds_alternative<Mark>(record)) {
    image.complete = false;
    image.tags.clear();
  } else {
    const auto& ended = std::get<Concluding>(record);
    image.complete = true;
    image.floor = std::max(image.floor, ended.conclude.floor);
    for (const Tagged& tagged : ended.tags) keep(image, tagged);
  }
}

bool MapStore::has(ChunkId chunk, Version version) const {
  const auto found = now_.chunks.find(chunk);
  if (found == now_.chunks.end() || version == 0) return false;
  return found->second.committed.version == version || found->second.pending.version == version;
}

void MapStore::spoil(ChunkId chunk, Version version) {
  for (Image* image : {&now_, &durable_}) {
    const auto found = image->chunks.find(chunk);
    if (found == image->chunks.end()) continue;
    for (Contents* contents : {&found->second.committed, &found->second.pending}) {
      if (contents->version == version) contents->bad = true;
    }
  }
}

bool MapStore::bad(ChunkId chunk, Version version) const {
  const auto found = now_.chunks.find(chunk);
  if (found == now_.chunks.end()) return false;
  const Kept& kept = found->second;
  return kept.committed.version == version ? kept.committed.bad : kept.pending.version == version && kept.pending.bad;
}

MapStore::Value MapStore::value(ChunkId chunk, Version version) const {
  const auto found = now_.chunks.find(chunk);
  if (found == now_.chunks.end()) return 0;
  const Kept& kept = found->second;
  return kept.pending.version == version ? kept.pending.value : kept.committed.value;
}

std::vector<Tagged> MapStore::tags(bool pending_as_they_are) const {
  std::vector<Tagged> all;
  for (const auto& [channel, known] : now_.tags) {
    all.push_back(known);
    const auto found = now_.chunks.find(known.chunk);
    const bool pending =
        found != now_.chunks.end() && found->second.pending.version != 0 && found->second.tag == known.tag;
    if (pending && !pending_as_they_are) all.back().version = 0;
  }
  return all;
}

Entry MapStore::entry_of(ChunkId chunk, const Kept& kept) {
  return {chunk,
          kept.committed.version,
          1,
          static_cast<std::uint32_t>(kept.committed.value),
          kept.pending.version,
          kept.pending.removes,
          static_cast<std::uint32_t>(kept.pending.value)};
}

Entry MapStore::entry(ChunkId chunk) const {
  const auto found = now_.chunks.find(chunk);
  return found != now_.chunks.end() ? entry_of(chunk, found->second) : Entry{chunk};
}

void MapStore::page(ChunkId after, std::size_t limit, std::vector<Entry>& to) const {
  for (auto at = now_.chunks.upper_bound(after); at != now_.chunks.end() && limit > 0; ++at, --limit) {
    to.push_back(entry_of(at->first, at->second));
  }
}

Tagged MapStore::tag(std::uint64_t client, std::uint32_t channel) const {
  const auto found = now_.tags.find({client, channel});
  return found != now_.tags.end() ? found->second : Tagged{};
}

std::vector<Pending> MapStore::pendings() const {
  std::vector<Pending> all;
  for (const auto& [chunk, kept] : now_.chunks) {
    if (kept.pending.version == 0) continue;
    all.push_back({chunk, kept.pending.version, 1, kept.pending.removes, kept.tag});
  }
  return all;
}

}  // namespace ff::fs3::replica
