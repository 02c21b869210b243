// Reads: at any SERVING target, of committed versions. A read of a chunk with a pending version is parked until that
// version ends, unless the read allows uncommitted contents.
#include "fs3/replica/replica.hpp"

namespace ff::fs3::replica {

Replica::ReadOutcome Replica::read_outcome(ChunkId chunk, ChainVersion chain_version) const {
  if (!serving() || !leased() || chain_version != chain_) return ReadOutcome::refuse;
  return chunks_.contains(chunk) ? ReadOutcome::step : ReadOutcome::serve;
}

void Replica::on(const Read& read) {
  const ReadOutcome outcome = read_outcome(read.chunk, read.chain_version);
  if (outcome == ReadOutcome::refuse) {
    reply(read.op, Status::stale_routing);
    return;
  }
  if (outcome == ReadOutcome::serve) {
    const Entry entry = lookup_.entry(read.chunk);
    if (entry.committed == 0) {
      reply(read.op, Status::not_found);
    } else {
      act(ServeRead{read.op, read.chunk, entry.committed});
    }
    return;
  }
  Place& place = *chunks_.find(read.chunk);
  Chunk& chunk = place.second;
  chunk.reads.push_back(read.op);
  if (chunk.pending == 0) {
    serve_parked(place);
  } else if (read.allow_uncommitted) {
    chunk.reads.pop_back();
    if (chunk.removes) {
      reply(read.op, Status::not_found);
    } else {
      act(ServeRead{read.op, read.chunk, chunk.pending});
    }
  }
}

void Replica::serve_parked(Place& place) {
  Chunk& chunk = place.second;
  for (const Op op : chunk.reads) {
    if (chunk.committed == 0) {
      reply(op, Status::not_found);
    } else {
      act(ServeRead{op, place.first, chunk.committed});
    }
  }
  chunk.reads.clear();
}

void Replica::refuse_parked(Place& place) {
  for (const Op op : place.second.reads) reply(op, Status::stale_routing);
  place.second.reads.clear();
}

}  // namespace ff::fs3::replica
