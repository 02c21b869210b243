// Internals of a Store: its state, and the steps that its files share. write.cpp: apply; commit.cpp: the rest of the
// write path; read.cpp; recover.cpp; snapshot.cpp.
//
// Lock order: snapshot_mutex_, sync_mutex_, mutex_ (guards all members not named here), held_mutex_ (held_),
// files_mutex_ (files_). No disk call runs under mutex_ or held_mutex_.
#pragma once

#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "fs3/store/layout/index.hpp"
#include "fs3/store/layout/records.hpp"
#include "fs3/store/layout/space.hpp"
#include "fs3/store/store.hpp"

namespace ff::fs3::store {

enum class Items : std::uint32_t { head = 1, entries, pending, tags, end };  // kind of a snapshot block's items

struct Pending {
  IndexEntry entry;  // the chunk's new entry
  bool removes = false;
};

struct Queued {
  Record record;
  std::uint64_t op = 0;
  bool apply = false;
  bool fresh = false;         // an Apply with a new extent
  std::vector<Extent> freed;  // freed by the record, once it is durable
};

// Log, index and identity each have a copy with the same bytes. Parts that do not verify in the original are taken from
// the copy.
inline constexpr std::string_view kCopyPrefix = "copy-";
inline std::string copy_name(const std::string& name) { return std::string(kCopyPrefix) + name; }

// An open file; the destructor closes it. Throws Error.
class Opened {
 public:
  Opened(Disk& disk, const std::string& name, bool create) : disk_(disk), file_(disk.open(name, create)) {}
  ~Opened() {
    if (exists()) disk_.close(file_);
  }
  Opened(const Opened&) = delete;
  Opened& operator=(const Opened&) = delete;
  bool exists() const { return file_ != kNoFile; }
  operator File() const { return file_; }

 private:
  Disk& disk_;
  const File file_;
};

class Core {
 public:
  Core(Disk& disk, Identity identity, Options options) : disk_(disk), identity_(identity), options_(options) {}
  ~Core();
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  void recover();  // recover.cpp; once, before anything else

  Status apply(std::uint64_t op, const Apply& apply);  // in write.cpp

  // commit.cpp
  Status settle(RecordKind kind, ChunkId chunk, Version version);  // kind is COMMIT or DROP
  void ride(const Record& record);  // installs the record now; it becomes durable with the next sync
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
  bool snapshot_due() const { return log_bytes_ > options_.log_bytes || renew_; }

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
  std::uint64_t mended_ = 0;         // pieces of log, index and identity that recover() took from their copies
  std::atomic<bool> renew_ = false;  // a snapshot is due, so that each file has an intact copy again
  std::atomic<bool> failed_ = false;
  std::atomic<bool> synced_ = true;  // outcome of the last sync()

 private:
  friend class Fill;
  // Applies a record to index, pending versions, floor, tags and words, at runtime and at recovery. Installing a record
  // again is harmless, even after later records, if the later records are then installed again, too. Appends the freed
  // extents to `freed`. REQUIRES: mutex_.
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

  // Bytes and CRC tables of extents, read.cpp. They throw Error.
  File file_of(Extent extent);
  void read_bytes(Extent extent, std::uint64_t offset, void* to, std::size_t bytes);  // zeros beyond the file's end
  // Returns the CRCs of blocks [first, end) of a version; the CRC of the version's last block comes from `entry`.
  std::vector<std::uint32_t> read_crcs(const IndexEntry& entry, std::uint32_t first, std::uint32_t end);
  void hold(Extent extent);
  bool look_up(const ReadAsk& ask, IndexEntry& entry) const;  // REQUIRES: mutex_
  void cover(const ReadAsk& ask, const IndexEntry& entry, bool cached);
  Crcs crcs_of(const IndexEntry& entry, std::uint32_t first, std::uint32_t end, bool cached);

  // recover.cpp
  bool read_identity(const std::string& name);
  void write_identity();  // also writes the copy
  void write_identity(const std::string& name);
  bool read_snapshot(std::uint64_t number, std::uint64_t& sequence);
  void read_logs(const std::vector<std::uint64_t>& numbers);
  void read_log(std::uint64_t number, bool last);
  std::vector<std::byte> read_whole(File file);
  void remove_both(const std::string& name);  // removes the copy first
  bool verifies(const IndexEntry& entry);
  void claim_extents();
  void punch_free(const std::vector<std::string>& names);
  void begin_log(std::uint64_t number);  // creates a log with a durable BEGIN and switches to it
  void begin_log_copy(std::uint64_t number, std::span<const std::byte> bytes);
  void renew_copy(const std::string& name, std::span<const std::byte> bytes);
  void copy_log(std::uint64_t position, std::span<const std::byte> bytes);

  // commit.cpp
  Status write_batch(std::vector<Queued>& batch);
  void sync_data(const std::vector<Queued>& batch);

  // snapshot.cpp
  void read_items(Items items, const std::byte* from, std::uint32_t count, std::uint64_t& sequence);
  void write_snapshot(std::uint64_t number, std::uint64_t sequence);
  void delete_older(std::uint64_t number);

  Index index_;
  std::unordered_map<ChunkId, Pending> pending_;
  std::unordered_set<ChunkId> busy_;  // chunks with an Apply between apply() and its Done
  Space space_;
  std::vector<Queued> queue_;
  std::uint64_t bytes_ = 0;  // sum of the committed lengths
  std::uint64_t salt_ = 0;   // salt of the store
  std::atomic<std::uint64_t> salts_ = 0;

  std::mutex sync_mutex_;  // guards the log's end
  File log_ = kNoFile, log_copy_ = kNoFile;
  std::uint64_t log_number_ = 0, log_size_ = 0, next_sequence_ = 1;
  std::atomic<std::uint64_t> log_bytes_ = 0;  // bytes of all logs since the last snapshot

  std::mutex snapshot_mutex_;

  struct Held {
    std::uint32_t count = 0;
    bool free = false;  // the extent is freed after its last Reading
  };
  mutable std::mutex held_mutex_;
  std::unordered_map<std::uint64_t, Held> held_;  // by packed extent

  std::shared_mutex files_mutex_;
  std::unordered_map<std::uint64_t, File> files_;  // by packed extent of slot 0
  std::atomic<bool> names_changed_ = false;        // a name changed since the last sync_names

  CrcPages crc_pages_;
};

}  // namespace ff::fs3::store
