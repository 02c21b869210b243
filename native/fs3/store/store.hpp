// The chunks of one target: bytes, versions, tags and the floor, on a Disk, safe against a crash at any instruction.
// docs/fs3-store.md describes the files.
//
// Thread contract: apply, commit, drop, read, entry, page, check and the other calls from any number of threads at
// once; sync() and snapshot() may run beside them and beside each other, and each waits for another call of itself.
// At most one Apply per chunk is under way (from apply() to its Done); a second one is refused.
// Readings must be gone before the Store, the Store before the Disk.
//
// Invariants
// 1. A chunk has at most one committed version and at most one pending one. Both are durable, with their bytes, when
//    they can be seen: an Apply shows in entry(), page() and read() from the sync() on that returns its Done.
// 2. A record of the log is written after the bytes that it names are durable.
// 3. No byte below the length of a version changes while that version is committed or pending, on the disk too, or while
//    a Reading of it lives.
// 4. An extent is free only when no durable record that a recovery would end with names it, and no Reading holds it.
// 5. After a failed sync or log write whose outcome is unknown the store is failed(): it answers reads, and io_error to
//    everything that writes, until it is opened anew.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "fs3/store/crcs.hpp"
#include "fs3/store/disk.hpp"
#include "fs3/types.hpp"

namespace ff::fs3::store {

struct Identity {
  std::uint32_t target = 0;
  std::uint32_t chain = 0;
  bool operator==(const Identity&) const = default;
};

struct Options {
  std::uint64_t log_bytes = std::uint64_t{64} << 20;      // a snapshot is due when the log is longer
  std::uint64_t reserve_bytes = std::uint64_t{256} << 20;  // new extents leave so much of the disk free for log and index
};

// Stands for "whatever base there is, and any pending version is given up": what a sync from another target applies.
inline constexpr Version kAnyBase = ~Version{0};

struct Apply {
  ChunkId chunk;
  Version base = 0;  // must be the committed version (0: none), with nothing pending, or DIVERGED. REPLACE: not looked at
  Version version = 0;  // not 0
  ChainVersion chain_version = 0;
  Kind kind = Kind::write;
  bool committed = false;     // commits in the same record
  std::uint32_t offset = 0;   // WRITE: of the bytes
  std::uint32_t length = 0;   // TRUNCATE, EXTEND: the new length; no change if it is not shorter, longer
  std::span<const std::byte> bytes = {};  // WRITE, REPLACE; the caller's until apply() returns
  // CRC32C of the pieces of `bytes` cut where the chunk's blocks of 4096 begin (first and last may be short); empty: the
  // store computes them. They are stored as they are given, not compared with the bytes.
  std::span<const std::uint32_t> crcs = {};
  Tag tag = {};  // client 0: none
};

struct Done {
  std::uint64_t op;
  Status status;  // ok, or io_error or no_space: then the chunk is as it was, until a crash perhaps
  Version version;
  std::uint32_t length;  // of the chunk afterwards
  std::uint32_t crc;     // CRC32C of the whole chunk
};

struct Tagged {  // the newest write of a (client, channel)
  Tag tag;
  ChunkId chunk;
  Version version = 0;
  std::uint32_t length = 0;
  auto operator<=>(const Tagged&) const = default;
};

struct VersionInfo {
  Version version = 0;  // 0: there is none
  ChainVersion chain_version = 0;
  std::uint32_t length = 0;
  std::uint32_t crc = 0;
  bool remove = false;  // only a pending one: it will remove the chunk
};

struct Entry {
  ChunkId chunk;
  VersionInfo committed, pending;
};

// A committed chunk, and how many of its inode stand in a row from it downwards, `stride` apart: itself included, at most
// kMostRun.
struct Last {
  ChunkId chunk;
  std::uint32_t length = 0;
  std::uint32_t run = 1;
};

struct Statistics {
  std::uint64_t chunks = 0;         // with a committed or pending version
  std::uint64_t bytes = 0;          // sum of the committed lengths
  std::uint64_t extents = 0;        // not free
  std::uint64_t extent_bytes = 0;   // of those
  std::uint64_t index_bytes = 0;    // memory of the index
  std::uint64_t log_bytes = 0;      // since the last snapshot
  std::uint64_t held = 0;           // extents held by Readings
};

class Core;

// The right to read a version's bytes: they stay until this is gone.
class Reading {
 public:
  Reading() = default;
  Reading(Reading&& other) noexcept { *this = std::move(other); }
  Reading& operator=(Reading&& other) noexcept;
  ~Reading() { release(); }

  Status status = Status::not_found;  // ok, not_found, corrupt (its extent is lost), or io_error; then nothing below holds
  Version version = 0;
  std::uint32_t chunk_length = 0;
  // The whole blocks that cover what was asked, the last one as long as the chunk: bytes [offset, offset + length) of the
  // chunk are at `position` of `file`, where what lies beyond the file's end is zeros. Nothing if length is 0.
  std::uint32_t offset = 0;
  std::uint32_t length = 0;
  File file = kNoFile;
  std::uint64_t position = 0;
  Crcs crcs;  // one a block, as stored: whoever uses the bytes compares

  Status copy(void* to) const;  // `length` bytes; ok or io_error
  static void release(std::span<Reading> readings) noexcept;  // as destroying each; cheaper

 private:
  friend class Core;
  void release() noexcept;
  Core* core_ = nullptr;
  std::uint64_t held_ = 0;  // the extent, packed
};

// One of many reads: `to` becomes what `read` of it returns.
struct ReadAsk {
  ChunkId chunk;
  Version version = 0;
  std::uint32_t offset = 0, length = 0;
  Reading* to = nullptr;
};

class Store {
 public:
  // Makes the store if the disk is empty. Time is proportional to the index and the log since the last snapshot. Throws
  // Error: invalid (the store of another target or chain, or of a format to come), storage, no_space.
  static Store open(Disk& disk, Identity identity, Options options = {});
  Store(Store&&) noexcept;
  ~Store();

  // Writes the bytes and queues the record. ok: a Done with `op` comes from a sync(). Else it is refused and nothing
  // changed: diverged (base, another pending version, or another Apply under way), corrupt (bytes of the base that it
  // needs fail their CRC), no_space, io_error, invalid.
  Status apply(std::uint64_t op, const Apply& apply);
  // The pending `version` becomes the committed one, at once; its record rides along with the next sync(). Before that
  // sync a crash may bring the pending version back. diverged: no such pending version, or an Apply under way.
  Status commit(ChunkId chunk, Version version);
  // Gives the pending version up, and its tag gets version 0, in one record; as commit() otherwise.
  Status drop(ChunkId chunk, Version version);
  void raise_floor(Version floor);              // these four ride along with the next sync() too
  void keep_tag(const Tagged& tagged);          // unless one of a larger seq, or of that seq and a larger version, is known
  void forget_client(std::uint64_t client);     // its tags
  void keep_state(const std::array<std::uint64_t, 4>& words);  // words of the replica's own

  // The group commit of all that was queued before. Never throws; failures are in the Dones and in failed().
  std::vector<Done> sync();
  // Whether the last sync() made its batch durable. If not, and the store has not failed, what rode along in it goes with
  // the next one.
  bool synced() const;
  bool snapshot_due() const;
  Status snapshot();  // new log, index written, old logs deleted; ok, or why not: nothing is lost then

  // `version` 0: the committed one. The chunk's end cuts the range.
  Reading read(ChunkId chunk, Version version, std::uint32_t offset, std::uint32_t length);
  void read(std::span<const ReadAsk> asks);  // each of them, at much less cost
  Entry entry(ChunkId chunk) const;  // both versions 0: there is no such chunk
  std::vector<Entry> page(std::optional<ChunkId> after, std::size_t limit) const;  // in order
  // The one with the largest index up to that of `upto`, of its inode; its run ends at an index that another stride has.
  // Time is logarithmic in all chunks, and linear in the run and in the pending chunks passed over.
  std::optional<Last> last(ChunkId upto, std::uint32_t stride = 0) const;  // 0: the run is 1
  // Reads the committed version whole and compares it with its CRCs: ok, corrupt, not_found, io_error.
  Status check(ChunkId chunk);

  Version floor() const;  // the highest version of any removed chunk
  std::vector<Tagged> tags() const;  // in order
  std::optional<Tagged> tag(std::uint64_t client, std::uint32_t channel) const;
  std::array<std::uint64_t, 4> state() const;
  // Some of what the log or the index held could not be read when the store was opened, now or before: any chunk may be
  // missing, old or back from removal, and tags and floor too low. Until clear_damage(), which says that all
  // contents were compared with another target's; it rides along with the next sync().
  bool damaged() const;
  void clear_damage();
  bool failed() const;
  Statistics statistics() const;

 private:
  explicit Store(std::unique_ptr<Core> core);
  std::unique_ptr<Core> core_;
};

}  // namespace ff::fs3::store
