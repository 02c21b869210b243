// The log's records, their encoding, and the walk over a log's bytes that distinguishes the end from damage.
// docs/internals/fs3-store.md, "Log record".
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "fs3/store/layout/space.hpp"
#include "fs3/types.hpp"

namespace ff::fs3::store {

inline constexpr std::size_t kRecordStep = 64;

enum class RecordKind : std::uint8_t { begin = 1, apply, commit, drop, floor, tag, forget, state, damaged };

struct Record {
  enum Flags : std::uint8_t {
    kCommitted = 1,
    kRemoves = 2,
    kAnyBase = 4,  // the record drops the chunk's pending version, if there is one
  };
  RecordKind kind = RecordKind::begin;
  std::uint8_t flags = 0;
  std::uint64_t sequence = 0;
  // Position in its batch. When the batch was written, all records up to sequence - place - 1 were durable.
  std::uint32_t place = 0;
  // The fields below that a record has. APPLY: all up to `tag`; COMMIT, DROP: chunk, version; FLOOR: version; TAG: tag,
  // chunk, version, length; FORGET: tag.client; STATE: words; DAMAGED: version (1 or 0).
  ChunkId chunk;
  Version version = 0;
  ChainVersion chain_version = 0;
  std::uint32_t length = 0;
  std::uint32_t crc = 0;
  std::uint32_t last_crc = 0;
  Extent extent;
  std::uint8_t extent_flags = 0;  // IndexEntry::Flags
  std::uint32_t salt = 0;
  Tag tag;
  std::array<std::uint64_t, 4> words{};  // STATE
};

// Identity of a log. The CRCs of records depend on it, so that no record verifies in another store, log or position.
struct LogPlace {
  std::uint64_t salt;                                 // salt of the store
  std::uint64_t number;                               // number of the log
  std::uint32_t start(std::uint64_t position) const;  // initial value of the CRC at `position`
};

// Appends `record` to `out`, whose first byte belongs at `position` of the log.
void encode(const Record& record, const LogPlace& log, std::uint64_t position, std::vector<std::byte>& out);

// Reads a log's bytes in order. A record that does not verify is replaced by the copy's record at the same place, if
// the copy has one.
class LogWalk {
 public:
  // REQUIRES of next(): `copy` is not longer than `bytes`.
  LogWalk(std::span<std::byte> bytes, std::span<const std::byte> copy, const LogPlace& log, std::uint64_t expected)
      : bytes_(bytes), copy_(copy), log_(log), expected_(expected) {}
  // Returns the next record; none at the end of the log. If its sequence is larger than expected, the records in
  // between are damaged in the log and in the copy.
  std::optional<Record> next();
  std::optional<std::uint64_t> first_sequence() const;  // sequence of the first record, if that record is valid
  std::uint64_t expected() const { return expected_; }  // sequence of the next record
  std::uint64_t position() const { return position_; }  // the end of the last record
  bool damaged() const { return damaged_; }
  std::uint64_t mended() const { return mended_; }  // records that were taken from the copy

 private:
  std::optional<Record> at(std::uint64_t position, std::uint64_t* end) const;
  std::optional<Record> at(std::span<const std::byte> bytes, std::uint64_t position, std::uint64_t* end) const;
  void mend(std::uint64_t begin, std::uint64_t end);
  std::span<std::byte> bytes_;
  std::span<const std::byte> copy_;
  LogPlace log_;
  std::uint64_t expected_;
  std::uint64_t position_ = 0;
  bool damaged_ = false;
  std::uint64_t mended_ = 0;
};

}  // namespace ff::fs3::store
