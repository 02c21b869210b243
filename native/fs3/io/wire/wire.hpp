// Frames of data connections: docs/internals/fs3-wire.md, "Data". Fixed little-endian structs, copied to and from the
// socket unchanged; no function allocates, blocks or throws.
//
//   | Head, 32 bytes | table: `table_bytes` | payload: `payload_bytes` |
//
// Invariant: a Head that `sound` accepts names sizes within the limits below, so memory of these sizes may be
// allocated.
#pragma once

#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>
#include <vector>

#include "fs3/types.hpp"

namespace ff::fs3::io {

static_assert(std::endian::native == std::endian::little, "frames are structs as they lie in memory");

inline constexpr std::uint32_t kMagic = 0x31443346;  // "F3D1"
inline constexpr std::size_t kMostEntries = 128;
inline constexpr std::size_t kMostPayload = std::size_t{4} << 20;  // maximum bytes of a payload with several entries
inline constexpr std::size_t kMostTable = std::size_t{1} << 20;
inline constexpr std::size_t kMostCrcs = kLargestChunk / kBlock;  // CRCs of one entry

enum class FrameKind : std::uint8_t {
  read = 1,
  read_answer = 2,
  write = 3,
  write_answer = 4,
  message = 5,  // from one replica to another
  query_last = 6,
  query_answer = 7,
  report = 8,  // from a reader: the bytes of these chunks failed their CRCs; has no answer
  ready = 9,   // for a READ with kHold: its bytes are in memory; the frame is only a head
  go = 10,     // for the same READ: the bytes may be sent now; the frame is only a head
};

// In a READ: the client can read from the node's files. In the answer: places in files instead of a payload.
inline constexpr std::uint8_t kLocal = 0x01;
inline constexpr std::uint8_t kHold = 0x02;  // in a READ: a large answer is sent only after `ready` and `go`
inline constexpr std::size_t kHoldFrom = std::size_t{64} << 10;  // answers with more bytes are large
inline constexpr std::size_t kLocalSlots = 32;                   // files that a connection's client holds open
inline constexpr auto kLocalTime = std::chrono::seconds(10);  // minimum time that extents are held for a local answer

struct Head {
  std::uint32_t magic = kMagic;
  FrameKind kind = FrameKind::read;
  std::uint8_t flags = 0;   // kLocal, kHold; of a message: its hop
  std::uint16_t count = 0;  // number of entries
  std::uint32_t table_bytes = 0;
  std::uint32_t done = 0;  // from a client: number of local answers on this connection whose bytes it has read
  std::uint64_t payload_bytes = 0;
  std::uint64_t request = 0;  // an answer carries the number of its request
};
static_assert(sizeof(Head) == 32);

struct ReadEntry {
  std::uint64_t inode = 0;
  std::uint32_t index = 0;
  std::uint32_t chain = 0;
  ChainVersion chain_version = 0;
  std::uint32_t offset = 0;
  std::uint32_t length = 0;
  std::uint32_t uncommitted = 0;  // 1: a pending version may be read
};
static_assert(sizeof(ReadEntry) == 32);

// The answer for one entry: whole blocks. The blocks' CRCs follow all entries in the table, in order; the payload has
// the bytes, in order.
struct ReadAnswer {
  Version version = 0;
  std::uint32_t chunk_length = 0;
  std::uint32_t offset = 0;  // offset of the first block in the chunk
  std::uint32_t length = 0;  // bytes sent: up to the chunk's end
  std::uint32_t crcs = 0;
  Status status = Status::ok;
  std::uint8_t zeros[7] = {};
};
static_assert(sizeof(ReadAnswer) == 32);

// Location of an entry's bytes in a local answer: one Place per entry, after the CRCs. The descriptors come with the
// frame's first byte, in the order of the `fresh` places.
struct Place {
  std::uint64_t position = 0;  // offset in the file
  std::uint16_t slot = 0;      // slot that holds the file
  std::uint8_t fresh = 0;      // 1: the next descriptor is put into the slot first
  std::uint8_t zeros[5] = {};
};
static_assert(sizeof(Place) == 16);

// An entry of a WRITE. CRCs of the pieces of its bytes, cut at the chunk's block boundaries, follow all entries in the
// table.
struct WriteEntry {
  std::uint64_t inode = 0;
  std::uint64_t client = 0;
  std::uint64_t seq = 0;
  std::uint32_t channel = 0;
  std::uint32_t index = 0;
  std::uint32_t chain = 0;
  ChainVersion chain_version = 0;
  std::uint32_t offset = 0;
  std::uint32_t length = 0;  // number of bytes; TRUNCATE and EXTEND: the chunk's new length, no bytes are sent
  std::uint32_t crcs = 0;
  Kind kind = Kind::write;
  std::uint8_t zeros[3] = {};
};
static_assert(sizeof(WriteEntry) == 56);

struct WriteAnswer {
  Version version = 0;
  std::uint32_t length = 0;  // length of the chunk after the write
  Status status = Status::ok;
  std::uint8_t zeros[3] = {};
};
static_assert(sizeof(WriteAnswer) == 16);

// Asks which of an inode's chunks on a chain has the largest index up to `upto`. Also asks for the number of chunks in
// the row that ends at this chunk: existing chunks whose indexes are `stride` apart.
struct QueryEntry {
  std::uint64_t inode = 0;
  std::uint32_t chain = 0;
  ChainVersion chain_version = 0;
  std::uint32_t upto = kLastIndex;
  std::uint32_t stride = 0;  // 0: the row is one chunk
};
static_assert(sizeof(QueryEntry) == 24);

struct QueryAnswer {
  std::uint32_t index = 0;
  std::uint32_t length = 0;
  std::uint32_t run = 0;       // chunks of the row, including this one: 1 to kMostRun
  Status status = Status::ok;  // not_found: there is no such chunk
  std::uint8_t zeros[3] = {};
};
static_assert(sizeof(QueryAnswer) == 16);

// Returns whether the head is possible: known kind, counts and sizes within limits and mutually consistent.
bool sound(const Head& head);

// Returns the number of pieces of [offset, offset + length) when it is cut at block boundaries.
constexpr std::uint32_t pieces(std::uint32_t offset, std::uint32_t length) {
  if (length == 0) return 0;
  return static_cast<std::uint32_t>((std::uint64_t{offset} + length - 1) / kBlock - offset / kBlock + 1);
}

// Returns whether `crcs` has one CRC32C for each of these pieces of `bytes`, and all match. `crcs` may have any
// alignment.
bool holds(std::span<const std::byte> bytes, std::uint32_t offset, std::span<const std::byte> crcs);

// Returns the n-th struct of a table that is long enough; tables may have any alignment.
template <class T>
T at(std::span<const std::byte> table, std::size_t n, std::size_t from = 0) {
  static_assert(std::is_trivially_copyable_v<T>);
  T value;
  std::memcpy(&value, table.data() + from + n * sizeof(T), sizeof(T));
  return value;
}

template <class T>
void put(std::vector<std::byte>& to, std::size_t at, const T& value) {
  std::memcpy(to.data() + at, &value, sizeof value);
}

// For a sound frame: returns whether its table consists of `count` entries and the CRCs that they name. Each entry must
// be possible for a chunk, and the payload must have the length that the entries name.
bool sound_read(const Head& head, std::span<const std::byte> table);
bool sound_write(const Head& head, std::span<const std::byte> table);
bool sound_read_answer(const Head& head, std::span<const std::byte> table);
// Returns whether the answer is possible for the question: a valid row of indexes.
bool sound_query_answer(const QueryAnswer& answer, std::uint32_t upto, std::uint32_t stride);

}  // namespace ff::fs3::io
