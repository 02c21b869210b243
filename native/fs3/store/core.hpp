// The inside of a Store: its state, and the steps that its files share. write.cpp: apply; commit.cpp: the rest of the
// write path; read.cpp; recover.cpp; snapshot.cpp.
//
// Locks, in the order in which they are taken: snapshot_mutex_, sync_mutex_, mutex_ (everything but what is named
// here), held_mutex_ (held_), files_mutex_ (files_). No disk call runs under mutex_ or held_mutex_.
#pragma once

#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "fs3/store/index.hpp"
#include "fs3/store/records.hpp"
#include "fs3/store/space.hpp"
#include "fs3/store/store.hpp"

namespace ff::fs3::store {

struct Pending {
  IndexEntry entry;  // what the chunk becomes
  bool removes = false;
};

struct Queued {
  Record record;
  std::uint64_t op = 0;
  bool apply = false;
  bool fresh = false;         // an Apply with an extent of its own
  std::vector<Extent> freed;  // by the record, once it is durable
};

class Core {
 public:
  Core(Disk& disk, Identity identity, Options options) : disk_(disk), identity_(identity), options_(options) {}
  ~Core();
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  void recover();  // recover.cpp; once, before anything else

  Status apply(std::uint64_t op, const Apply& apply);  // write.cpp

  // commit.cpp
  Status settle(RecordKind kind, ChunkId chunk, Version version);  // COMMIT or DROP
  void ride(const Record& record);                                 // installed now, durable with the next sync
  std::vector<Done> sync();
  void free_unheld(const std::vector<Extent>& extents) noexcept;
  void release(std::span<const std::uint64_t> packed) noexcept;

  // read.cpp
  void read(std::span<const ReadAsk> asks, bool cached = true);
  Status check(ChunkId chunk);
  Entry entry(ChunkId chunk) const;
  std::vector<Entry> page(std::optional<ChunkId> after, std::size_t limit) const;
  std::optional<Last> last(ChunkId upto, std::uint32_t stride) const;
  Statistics statistics() const;

  // snapshot.cpp
  Status snapshot();
  bool snapshot_due() const { return log_bytes_ > options_.log_bytes; }

  static std::string log_name(std::uint64_t number);
  static std::string index_name(std::uint64_t number);

  Disk& disk_;
  const Identity identity_;
  const Options options_;

  mutable std::shared_mutex mutex_;
  Version floor_ = 0;
  std::map<std::pair<std::uint64_t, std::uint32_t>, Tagged> tags_;
  std::array<std::uint64_t, 4> words_{};
  bool damaged_ = false;
  std::atomic<bool> failed_ = false;
  std::atomic<bool> synced_ = true;  // the last sync()

 private:
  friend class Fill;
  // What a record does to index, pending versions, floor, tags and words, now or when it is read again: the same for
  // a state that has seen it and some that follow, once those are installed too. Appends what becomes free. Under mutex_.
  void install(const Record& record, std::vector<Extent>& freed);
  void install_version(const IndexEntry& entry, bool removes, std::vector<Extent>& freed);
  void give_up(ChunkId chunk, std::vector<Extent>& freed);
  void put_entry(const IndexEntry& entry);
  void erase_entry(ChunkId chunk);
  void keep_tag(const Tagged& tagged);

  // write.cpp
  struct Plan;
  Status plan(const Apply& apply, Plan& plan);
  void queue(std::uint64_t op, const Apply& apply, const Plan& plan);
  Extent take(std::uint8_t size_class);
  std::uint32_t new_salt();

  // Bytes and tables of extents, read.cpp. Throw Error.
  File file_of(Extent extent);
  void read_bytes(Extent extent, std::uint64_t offset, void* to, std::size_t bytes);  // zeros beyond the file's end
  // CRCs of blocks [first, end) of a version, the last one's from its entry.
  std::vector<std::uint32_t> read_crcs(const IndexEntry& entry, std::uint32_t first, std::uint32_t end);
  void hold(Extent extent);
  bool look_up(const ReadAsk& ask, IndexEntry& entry) const;  // REQUIRES: mutex_
  void cover(const ReadAsk& ask, const IndexEntry& entry, bool cached);
  Crcs crcs_of(const IndexEntry& entry, std::uint32_t first, std::uint32_t end, bool cached);

  // recover.cpp
  bool read_identity();
  void write_identity();
  bool read_snapshot(std::uint64_t number, std::uint64_t& sequence);
  void read_logs(const std::vector<std::uint64_t>& numbers);
  void read_log(std::uint64_t number, bool last);
  void claim_extents();
  void punch_free(const std::vector<std::string>& names);
  void begin_log(std::uint64_t number);  // a new file with its BEGIN, durable; then it is the log

  // commit.cpp
  Status write_batch(std::vector<Queued>& batch);
  void sync_data(const std::vector<Queued>& batch);

  // snapshot.cpp
  void write_snapshot(std::uint64_t number, std::uint64_t sequence);
  void delete_older(std::uint64_t number);

  Index index_;
  std::unordered_map<ChunkId, Pending> pending_;
  std::unordered_set<ChunkId> busy_;  // with an Apply between apply() and its Done
  Space space_;
  std::vector<Queued> queue_;
  std::uint64_t bytes_ = 0;  // sum of the committed lengths
  std::uint64_t salt_ = 0;   // of the store
  std::atomic<std::uint64_t> salts_ = 0;

  std::mutex sync_mutex_;  // the log's end
  File log_ = kNoFile;
  std::uint64_t log_number_ = 0, log_size_ = 0, next_sequence_ = 1;
  std::atomic<std::uint64_t> log_bytes_ = 0;  // of all logs since the last snapshot

  std::mutex snapshot_mutex_;

  struct Held {
    std::uint32_t count = 0;
    bool free = false;  // when nobody holds it any more
  };
  mutable std::mutex held_mutex_;
  std::unordered_map<std::uint64_t, Held> held_;  // by packed extent

  std::shared_mutex files_mutex_;
  std::unordered_map<std::uint64_t, File> files_;  // by packed extent of slot 0
  std::atomic<bool> names_changed_ = false;        // since the last sync_names

  CrcPages crc_pages_;
};

}  // namespace ff::fs3::store
