// The Lookup over a target's chunk store. The word "complete" of docs/internals/fs3-chain.md is state()[0]: 0 if the
// store is a complete replica (like a new store), else 1.
// Thread contract: as the store's; the store must outlive this object.
#pragma once

#include "fs3/replica/lookup.hpp"
#include "fs3/store/store.hpp"

namespace ff::fs3::replica {

class StoreLookup final : public Lookup {
 public:
  explicit StoreLookup(const store::Store& store) : store_(store) {}

  Entry entry(ChunkId chunk) const override;
  void page(ChunkId after, std::size_t limit, std::vector<Entry>& to) const override;
  Tagged tag(std::uint64_t client, std::uint32_t channel) const override;
  Version floor() const override { return store_.floor(); }
  bool complete() const override { return store_.state()[0] == 0 && !store_.damaged(); }
  std::vector<Pending> pendings() const override;  // reads the whole index

 private:
  const store::Store& store_;
};

}  // namespace ff::fs3::replica
