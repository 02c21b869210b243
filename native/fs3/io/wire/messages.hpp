// Messages between replicas, encoded as the tables of `message` frames. All functions are pure.
//
// table: u32 to (target) | u8 which alternative | u8 3 zeros | fields in order | CRCs of the contents, if any
//
// The Send action defines the payload: contents, or the tags of a store.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "fs3/replica/events.hpp"
#include "fs3/store/store.hpp"

namespace ff::fs3::io {

struct Posted {
  TargetId to = 0;
  replica::Message message;
  std::vector<std::uint32_t> crcs;  // CRCs of the payload's pieces, cut at the chunk's block boundaries
};

std::vector<std::byte> encode(const Posted& posted);
// Returns none for a table that `encode` never produces: unknown alternatives, wrong lengths, impossible values.
std::optional<Posted> decode(std::span<const std::byte> table);

// Returns the number by which the sender recognizes the answer to a request; 0 if the message is an answer.
replica::Op asks(const replica::Message& message);

std::vector<std::byte> encode_tags(std::span<const store::Tagged> tags);
std::optional<std::vector<store::Tagged>> decode_tags(std::span<const std::byte> payload);

}  // namespace ff::fs3::io
