// What a replica asks the store of its target while it takes a step. The answers hold what all actions of earlier steps
// made of the store, as far as they were reported (an Apply may show from its sync on, before its Applied comes).
#pragma once

#include <cstddef>
#include <vector>

#include "fs3/replica/events.hpp"

namespace ff::fs3::replica {

struct Tagged {
  Tag tag;  // client 0: nothing known of the channel
  ChunkId chunk;
  Version version = 0;  // 0: the write with this seq did not happen, those with lower ones are over
};

struct Pending {
  ChunkId chunk;
  Version version = 0;
  std::uint32_t length = 0;  // of the chunk with it
  bool removes = false;
  Tag tag;
};

class Lookup {
 public:
  virtual ~Lookup() = default;
  virtual Entry entry(ChunkId chunk) const = 0;  // committed and pending 0: there is no such chunk
  // At most `limit` entries after `after`, in order, those with only a pending version too; appended to `to`.
  virtual void page(ChunkId after, std::size_t limit, std::vector<Entry>& to) const = 0;
  virtual Tagged tag(std::uint64_t client, std::uint32_t channel) const = 0;
  virtual Version floor() const = 0;
  virtual bool complete() const = 0;  // the durable word of Mark and Conclude (true in an empty new store), and no damage
  virtual std::vector<Pending> pendings() const = 0;  // all of them; asked once
};

}  // namespace ff::fs3::replica
