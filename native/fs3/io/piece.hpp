// What a client wants of one chunk, and what became of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "fs3/io/wire.hpp"

namespace ff::fs3::io {

inline constexpr std::uint32_t kAnyNode = 0xffffffff;

// The Status that the service gave, under the same number, or what the client found itself.
enum class Outcome : std::uint8_t {
  ok = 0,
  stale_routing = 1,
  corrupt = 4,  // as the service says; `mismatch` as the client found
  invalid = 8,
  mismatch = 16,     // the bytes that came do not fit their CRCs
  lost = 17,         // the connection broke: a write may have been done or not
  late = 18,         // no answer before the deadline: likewise
  unreachable = 19,  // no connection: not done
  no_route = 20,     // the routing names no serving target: not done
  open = 32,         // not tried, or to be tried again
};

static_assert(static_cast<int>(Outcome::stale_routing) == static_cast<int>(Status::stale_routing) &&
              static_cast<int>(Outcome::corrupt) == static_cast<int>(Status::corrupt) &&
              static_cast<int>(Outcome::invalid) == static_cast<int>(Status::invalid));

// Invariants
//   - One that is ok stays so; only those that are `open` are tried.
//   - `channel` != 0: a write was sent with the tag (client, channel, seq) and it is not known what became of it. It is
//     sent again with that tag only.
struct Piece {
  ChunkId chunk = {};
  std::uint32_t chain = 0;
  std::uint32_t offset = 0;
  std::uint32_t length = 0;      // of the bytes; TRUNCATE and EXTEND: of the chunk then, and no bytes
  Kind kind = Kind::write;
  Outcome outcome = Outcome::open;
  std::byte* memory = nullptr;   // reads fill it, writes do not change it
  std::uint32_t choice = kAnyNode;  // whom to ask, if the routing has it; writes ask the head

  std::uint32_t asked = kAnyNode;  // who was
  ChainVersion chain_version = 0;  // then
  Version version = 0;             // answers
  std::uint32_t chunk_length = 0;
  std::uint32_t stride = 0;        // QUERY_LAST: as in QueryEntry; `chunk.index`: up to which
  std::uint32_t found = 0;         // index of the last chunk, and how many stand in a row; 0: none does
  std::uint32_t run = 0;

  std::uint32_t channel = 0;
  std::uint64_t seq = 0;
  std::vector<std::uint32_t> crcs = {};  // of what a write carries, made when it is first sent

  bool carries() const { return kind == Kind::write && length != 0; }
};

}  // namespace ff::fs3::io
