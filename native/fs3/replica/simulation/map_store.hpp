// A store in a map, for tests of the replica. A chunk's contents are one number; a log of unsynced records stands for
// the disk. Thread contract: one thread.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <variant>
#include <vector>

#include "fs3/replica/actions.hpp"
#include "fs3/replica/lookup.hpp"

namespace ff::fs3::replica {

class MapStore final : public Lookup {
 public:
  using Value = std::uint64_t;  // 0: no contents

  // Returns the result of writing `written` over `before`; it shows the order and number of the writes.
  static Value combine(Value before, Value written);

  // Each returns its Applied at once if the change is refused; otherwise the next sync() returns it. `bad`: a REPLACE
  // whose bytes fail their CRC and were sent `as_is`.
  std::vector<Applied> apply(const Apply& apply, Value written, bool bad = false);
  void commit(const Commit& commit);
  void drop(const Drop& drop);
  void mark();
  void conclude(const Conclude& conclude, std::vector<Tagged> tags);
  std::vector<Applied> sync();

  // Loses the newest `lost` unsynced records; also the newest `synced` syncs, as on a disk that ignores syncs.
  void power_cut(std::size_t lost, std::size_t synced = 0);
  std::size_t unsynced() const { return log_.size(); }
  std::size_t syncs() const { return past_.size(); }
  void spoil(ChunkId chunk, Version version);  // makes the version's bytes fail their CRC from now on
  void fill(bool full) { full_ = full; }

  bool has(ChunkId chunk, Version version) const;
  bool bad(ChunkId chunk, Version version) const;
  Value value(ChunkId chunk, Version version) const;
  std::vector<Tagged> tags(bool pending_as_they_are) const;

  Entry entry(ChunkId chunk) const override;
  void page(ChunkId after, std::size_t limit, std::vector<Entry>& to) const override;
  Tagged tag(std::uint64_t client, std::uint32_t channel) const override;
  Version floor() const override { return now_.floor; }
  bool complete() const override { return now_.complete; }
  std::vector<Pending> pendings() const override;

 private:
  struct Contents {
    Version version = 0;
    Value value = 0;
    bool removes = false;
    bool bad = false;  // the bytes fail their CRC
  };
  struct Kept {
    Contents committed, pending;
    Tag tag;
  };
  struct Image {
    std::map<ChunkId, Kept> chunks;
    std::map<std::pair<std::uint64_t, std::uint32_t>, Tagged> tags;
    Version floor = 0;
    bool complete = true;
  };
  struct Write {
    Write(const replica::Apply& a, Value v, bool b) : apply(a), value(v), bad(b) {}
    Apply apply;
    Value value;
    bool bad;
  };
  struct Concluding {
    Concluding(const replica::Conclude& c, std::vector<Tagged> t) : conclude(c), tags(std::move(t)) {}
    Conclude conclude;
    std::vector<Tagged> tags;
  };
  using Record = std::variant<Write, Commit, Drop, Mark, Concluding>;

  static void replay(Image& image, const Record& record);
  static void keep(Image& image, const Tagged& tagged);
  static Entry entry_of(ChunkId chunk, const Kept& kept);

  Image now_;      // the visible state
  Image durable_;  // the state after a power cut, without the kept part of the log
  std::vector<Record> log_;
  std::vector<Image> past_;  // states before the newest syncs
  bool full_ = false;
};

}  // namespace ff::fs3::replica
