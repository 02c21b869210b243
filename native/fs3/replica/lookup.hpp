// Queries of a replica to its target's store during a step. The answers reflect all actions of earlier steps whose
// outcome was reported. An Apply may become visible when the store makes it durable, before the replica gets its
// Applied.
#pragma once

#include <cstddef>
#include <vector>

#include "fs3/replica/events.hpp"

namespace ff::fs3::replica {

struct Tagged {
  Tag tag;  // client 0: no write of the channel is known
  ChunkId chunk;
  Version version = 0;  // 0: the write with this seq did not happen, and writes with lower seqs are over
};

struct Pending {
  ChunkId chunk;
  Version version = 0;
  std::uint32_t length = 0;  // of the chunk in that version
  bool removes = false;
  Tag tag;
};

class Lookup {
 public:
  virtual ~Lookup() = default;
  virtual Entry entry(ChunkId chunk) const = 0;  // committed and pending 0: no such chunk
  // Appends to `to` at most `limit` entries after `after`, in order, including those with only a pending version.
  virtual void page(ChunkId after, std::size_t limit, std::vector<Entry>& to) const = 0;
  virtual Tagged tag(std::uint64_t client, std::uint32_t channel) const = 0;
  virtual Version floor() const = 0;
  virtual bool complete() const = 0;  // the durable word is "complete", as in a new store, and no damage is known
  virtual std::vector<Pending> pendings() const = 0;  // all pending versions; called once, by Replica's constructor
};

}  // namespace ff::fs3::replica
