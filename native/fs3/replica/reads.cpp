// Reads: at any SERVING target, of committed versions.
#include "fs3/replica/replica.hpp"

namespace ff::fs3::replica {

void Replica::on(const Read& read) {
  if (!serving() || !leased() || read.chain_version != chain_) {
    reply(read.op, Status::stale_routing);
    return;
  }
  const auto found = chunks_.find(read.chunk);
  if (found == chunks_.end()) {
    const Entry entry = lookup_.entry(read.chunk);
    if (entry.committed == 0) {
      reply(read.op, Status::not_found);
    } else {
      act(ServeRead{read.op, read.chunk, entry.committed});
    }
    return;
  }
  Chunk& chunk = found->second;
  chunk.reads.push_back(read.op);
  if (chunk.pending == 0) {
    serve_parked(*found);
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
