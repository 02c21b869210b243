// The chunks of one target: bytes, versions, tags and the floor, on a Disk, crash-safe at any instruction.
// docs/internals/fs3-store.md describes the files.
//
// Thread contract: any number of threads may call all methods at once. sync() and snapshot() run concurrently with the
// other methods and with each other; two calls of sync(), or two of snapshot(), run one after the other. At most one
// Apply per chunk is in flight (from apply() to its Done); a second one is refused. Readings must be destroyed before
// the Store, the Store before the Disk.
//
// Invariants
// 1. A chunk has at most one committed version and at most one pending one. Both are durable, with their bytes, when
//    they are visible: an Apply shows in entry(), page() and read() from the sync() on that returns its Done.
// 2. A record of the log is written after the bytes that it names are durable.
// 3. No byte below the length of a version changes, also on the disk, while that version is committed or pending or a
//    Reading of it lives.
// 4. An extent is free only when no Reading holds it and no state that recovery could restore after a crash names it.
// 5. After a sync or log write that failed with unknown outcome, failed() is true. Until the store is reopened, it
//    answers reads, and answers all writes with io_error.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "fs3/store/crcs.hpp"
#include "fs3/store/disk/disk.hpp"
#include "fs3/types.hpp"

namespace ff::fs3::store {

struct Identity {
  std::uint32_t target = 0;
  std::uint32_t chain = 0;
  bool operator==(const Identity&) const = default;
};

struct Options {
  std::uint64_t log_bytes = std::uint64_t{64} << 20;  // a snapshot is due when the log is longer
  std::uint64_t reserve_bytes = std::uint64_t{256}
                                << 20;  // new extents leave this much of the disk free for log and index
};

// Base of changes that a sync from another target applies: any base is allowed, and a pending version is dropped.
inline constexpr Version kAnyBase = ~Version{0};

struct Apply {
  ChunkId chunk;
  // Version that the change builds on (0: none). If it is not the committed version, or another version is pending,
  // apply() returns diverged. kAnyBase and Kind::replace skip this check.
  Version base = 0;
  Version version = 0;  // not 0
  ChainVersion chain_version = 0;
  Kind kind = Kind::write;
  bool committed = false;    // the record also commits the version
  std::uint32_t offset = 0;  // WRITE: offset of the bytes
  // TRUNCATE, EXTEND: the new length. A TRUNCATE never lengthens the chunk, an EXTEND never shortens it.
  std::uint32_t length = 0;
  // WRITE, REPLACE: the new bytes. The caller keeps them valid until apply() returns.
  std::span<const std::byte> bytes = {};
  // CRC32C of the pieces of `bytes`, cut at the boundaries of the chunk's 4096-byte blocks (first and last may be
  // short). If empty, the store computes them. They are stored as given, not compared with the bytes.
  std::span<const std::uint32_t> crcs = {};
  Tag tag = {};  // client 0: none
};

struct Done {
  std::uint64_t op;
  Status status;  // ok, io_error or no_space; if it is not ok, the chunk is unchanged, at least until a crash
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
  Version version = 0;  // 0: no such version
  ChainVersion chain_version = 0;
  std::uint32_t length = 0;
  std::uint32_t crc = 0;
  bool remove = false;  // only for a pending version: it will remove the chunk
  bool lost = false;    // its bytes are lost, because the log is damaged
};

struct Entry {
  ChunkId chunk;
  VersionInfo committed, pending;
};

// A committed chunk, and the number of chunks in the row that ends with it. A row is the chunks of one inode at indices
// `stride` apart, without a gap.
struct Last {
  ChunkId chunk;
  std::uint32_t length = 0;  // of this chunk, in bytes
  std::uint32_t run = 1;     // chunks of the row, including this one; at most kMostRun
};

struct Statistics {
  std::uint64_t chunks = 0;        // with a committed or pending version
  std::uint64_t bytes = 0;         // sum of the committed lengths
  std::uint64_t extents = 0;       // extents not free
  std::uint64_t extent_bytes = 0;  // bytes of the extents not free
  std::uint64_t index_bytes = 0;   // memory of the index
  std::uint64_t log_bytes = 0;     // bytes of the logs since the last snapshot
  std::uint64_t held = 0;          // extents held by Readings
  std::uint64_t mended = 0;        // damaged pieces of log, index and identity that open() took from their copies
};

class Core;

// The right to read a version's bytes: they stay unchanged until the Reading is destroyed.
class Reading {
 public:
  Reading() = default;
  Reading(Reading&& other) noexcept { *this = std::move(other); }
  Reading& operator=(Reading&& other) noexcept;
  ~Reading() { release(); }

  // ok, not_found, corrupt (the version's extent is lost), or io_error (the other fields are invalid)
  Status status = Status::not_found;
  Version version = 0;
  std::uint32_t chunk_length = 0;
  // The whole blocks that cover the requested range; the last one ends with the chunk. Bytes [offset, offset + length)
  // of the chunk are at `position` of `file`; bytes beyond the file's end are zeros. If length is 0, there are none.
  std::uint32_t offset = 0;
  std::uint32_t length = 0;
  File file = kNoFile;
  std::uint64_t position = 0;
  Crcs crcs;  // one per block, as stored: the user of the bytes must compare

  Status copy(void* to) const;                                // copies `length` bytes; ok or io_error
  static void release(std::span<Reading> readings) noexcept;  // like the destruction of each Reading, but cheaper

 private:
  friend class Core;
  void release() noexcept;
  Core* core_ = nullptr;
  std::uint64_t held_ = 0;  // the extent, packed
};

// One of several reads in one call: `to` receives the Reading that `read` would return for these arguments.
struct ReadAsk {
  ChunkId chunk;
  Version version = 0;
  std::uint32_t offset = 0, length = 0;
  Reading* to = nullptr;
};

class Store {
 public:
  // Creates the store if the disk is empty. Takes time proportional to the index and the log since the last snapshot.
  // Throws Error: invalid (the store of another target or chain, or of a newer format), storage, no_space.
  static Store open(Disk& disk, Identity identity, Options options = {});
  Store(Store&&) noexcept;
  ~Store();

  // Writes the bytes and queues the record. ok: a later sync() returns a Done with `op`. Otherwise the change is
  // refused and nothing changed: diverged (wrong base, another pending version, or another Apply in flight), corrupt
  // (needed bytes of the base fail their CRC), no_space, io_error, invalid.
  Status apply(std::uint64_t op, const Apply& apply);
  // Makes the pending `version` the committed one, at once; its record becomes durable with the next sync(). Before
  // that sync a crash may restore the pending version. diverged: no such pending version, or an Apply in flight.
  Status commit(ChunkId chunk, Version version);
  // Drops the pending version and sets its tag's version to 0, in one record; otherwise like commit().
  Status drop(ChunkId chunk, Version version);
  // Like commit(), each of the next four calls takes effect at once and becomes durable with the next sync().
  void raise_floor(Version floor);
  void keep_tag(const Tagged& tagged);       // no effect if a tag with a larger (seq, version) is known
  void forget_client(std::uint64_t client);  // forgets the client's tags
  void keep_state(const std::array<std::uint64_t, 4>& words);  // the replica's own words; the store only keeps them

  // Group commit of all changes queued before. Never throws; the Dones and failed() report failures.
  std::vector<Done> sync();
  // Returns whether the last sync() made its batch durable. If it did not, and failed() is false, the next sync()
  // writes the records of the batch again, except for its Applies.
  bool synced() const;
  bool snapshot_due() const;
  Status snapshot();  // starts a new log, writes the index, deletes old logs. An error loses no data

  // `version` 0: the committed one. The range is cut at the chunk's end.
  Reading read(ChunkId chunk, Version version, std::uint32_t offset, std::uint32_t length);
  void read(std::span<const ReadAsk> asks);  // like many calls of read, at much less cost
  Entry entry(ChunkId chunk) const;          // both versions 0: no such chunk
  std::vector<Entry> page(std::optional<ChunkId> after, std::size_t limit) const;  // in order
  // Returns the committed chunk of the inode `upto.inode` with the largest index up to `upto.index`. `run` counts the
  // row of chunks `stride` apart that ends with this chunk; stride 0: `run` is 1. Takes time logarithmic in all chunks,
  // and linear in the row and in the pending chunks that are skipped.
  std::optional<Last> last(ChunkId upto, std::uint32_t stride = 0) const;
  // Reads the committed version whole and compares it with its CRCs: ok, corrupt, not_found, io_error.
  Status check(ChunkId chunk);

  Version floor() const;             // the highest version of any removed chunk
  std::vector<Tagged> tags() const;  // in order
  std::optional<Tagged> tag(std::uint64_t client, std::uint32_t channel) const;
  std::array<std::uint64_t, 4> state() const;
  // True if part of the log or the index was unreadable at this or an earlier open. Then any chunk may be missing or
  // old, removed chunks may be present again, and tags and floor may be too low. The damage lasts until clear_damage(),
  // which declares that all contents were compared with another target's. The record of clear_damage() becomes durable
  // with the next sync().
  bool damaged() const;
  void clear_damage();
  bool failed() const;
  Statistics statistics() const;

 private:
  explicit Store(std::unique_ptr<Core> core);
  std::unique_ptr<Core> core_;
};

}  // namespace ff::fs3::store
