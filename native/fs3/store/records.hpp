// What the log holds: records, their bytes, and the walk over a log's bytes that tells an end from damage.
// docs/fs3-store.md, "Log record".
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "fs3/store/space.hpp"
#include "fs3/types.hpp"

namespace ff::fs3::store {

inline constexpr std::size_t kRecordStep = 64;

enum class RecordKind : std::uint8_t { begin = 1, apply, commit, drop, floor, tag, forget, state, damaged };

struct Record {
  enum Flags : std::uint8_t {
    kCommitted = 1,
    kRemoves = 2,
    kAnyBase = 4,  // gives up a pending version
  };
  RecordKind kind = RecordKind::begin;
  std::uint8_t flags = 0;
  std::uint64_t sequence = 0;
  std::uint32_t place = 0;  // in its batch: when it was written everything up to sequence - place - 1 was durable
  // APPLY: all; COMMIT, DROP: chunk, version; FLOOR: version; TAG: tag, chunk, version, length; FORGET: tag.client;
  // DAMAGED: version is 1 or 0
  ChunkId chunk;
  Version version = 0;
  ChainVersion chain_version = 0;
  std::uint32_t length = 0;
  std::uint32_t crc = 0;
  std::uint32_t last_crc = 0;
  Extent extent;
  std::uint8_t extent_flags = 0;  // of IndexEntry
  std::uint32_t salt = 0;
  Tag tag;
  std::array<std::uint64_t, 4> words{};  // STATE
};

// Where a log's records belong: no record verifies in another store, file or place.
struct LogPlace {
  std::uint64_t salt;    // of the store
  std::uint64_t number;  // of the log
  std::uint32_t start(std::uint64_t position) const;  // what the CRC at `position` begins with
};

// Appends `record` to `out`, whose first byte belongs at `position` of the log.
void encode(const Record& record, const LogPlace& log, std::uint64_t position, std::vector<std::byte>& out);

// Reads a log's bytes in order.
class LogWalk {
 public:
  LogWalk(std::span<const std::byte> bytes, const LogPlace& log, std::uint64_t expected)
      : bytes_(bytes), log_(log), expected_(expected) {}
  // The next record; none at the end of the log. One with a larger sequence than was expected: what lay between is
  // damaged.
  std::optional<Record> next();
  std::optional<std::uint64_t> first_sequence() const;  // of the record at the begin, if one is there
  std::uint64_t expected() const { return expected_; }  // sequence of the next record
  std::uint64_t position() const { return position_; }  // the end of the last one
  bool damaged() const { return damaged_; }

 private:
  std::optional<Record> at(std::uint64_t position, std::uint64_t* end) const;
  std::span<const std::byte> bytes_;
  LogPlace log_;
  std::uint64_t expected_;
  std::uint64_t position_ = 0;
  bool damaged_ = false;
};

}  // namespace ff::fs3::store
