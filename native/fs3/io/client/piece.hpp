// A client's request for one chunk, and its outcome.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "fs3/io/wire/wire.hpp"

namespace ff::fs3::io {

inline constexpr std::uint32_t kAnyNode = 0xffffffff;

// The service's Status, with the same number, or a finding of the client.
enum class Outcome : std::uint8_t {
  ok = 0,
  stale_routing = 1,
  corrupt = 4,  // reported by the service; `mismatch` is found by the client
  invalid = 8,
  mismatch = 16,     // the received bytes do not match their CRCs
  lost = 17,         // the connection broke: a write may have been done or not
  late = 18,         // no answer before the deadline: a write may have been done or not
  unreachable = 19,  // no connection: not done
  no_route = 20,     // the routing names no serving target: not done
  open = 32,         // not tried, or to be tried again
};

static_assert(static_cast<int>(Outcome::stale_routing) == static_cast<int>(Status::stale_routing) &&
              static_cast<int>(Outcome::corrupt) == static_cast<int>(Status::corrupt) &&
              static_cast<int>(Outcome::invalid) == static_cast<int>(Status::invalid));

// Invariants
//   - A piece that is ok stays ok; only pieces that are `open` are tried.
//   - `channel` != 0: a write was sent with the tag (client, channel, seq) and its outcome is unknown. It is retried
//     only with that tag.
struct Piece {
  ChunkId chunk = {};
  std::uint32_t chain = 0;
  std::uint32_t offset = 0;
  std::uint32_t length = 0;  // bytes to read or write; TRUNCATE and EXTEND: the chunk's new length, no bytes are sent
  Kind kind = Kind::write;
  Outcome outcome = Outcome::open;
  std::byte* memory = nullptr;      // reads fill it, writes do not change it
  std::uint32_t choice = kAnyNode;  // node to ask, if the routing has it; writes ask the head

  std::uint32_t asked = kAnyNode;  // node that was asked
  ChainVersion chain_version = 0;  // version of the routing used for the piece
  Version version = 0;             // version of the chunk, from the answer
  std::uint32_t chunk_length = 0;  // from the answer
  std::uint32_t crc = 0;     // READ: CRC32C of the `length` bytes in memory, combined from the CRCs of checked blocks
  std::uint32_t stride = 0;  // QUERY_LAST: as in QueryEntry; `chunk.index` is the upper bound
  std::uint32_t found = 0;   // QUERY_LAST: index of the last chunk
  std::uint32_t run = 0;     // QUERY_LAST: number of chunks, `stride` apart, that end at `found`; 0: there is no chunk

  std::uint32_t channel = 0;
  std::uint64_t seq = 0;
  std::vector<std::uint32_t> crcs = {};  // CRCs of a write's bytes, made when it is first sent

  bool carries() const { return kind == Kind::write && length != 0; }
};

}  // namespace ff::fs3::io
