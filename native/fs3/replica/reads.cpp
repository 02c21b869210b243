// Reads: at any SERVING target, of committed versions.
#include "fs3/replica/replica.hpp"

namespace ff::fs3::replica {

Replica::Glance Replica::glance(ChunkId chunk, ChainVersion chain_version) const {
  if (!serving() || !leased() || chain_version != chain_) return Glance::refuse;
  return chunks_.contains(chunk) ? Glance::step : Glance::serve;
}

void Replica::on(const Read& read) {
  const Glance glanced = glance(read.chunk, read.chain_version);
  if (glanced == Glance::refuse) {
    reply(read.op, Status::stale_routing);
    return;
  }
  if (glanced == Glance::serve) {
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
