// Messages between replicas as the tables of `message` frames. Pure.
//
//   table: u32 to (target) | u8 which alternative | u8 3 zeros | fields in order | CRCs of the contents, if any
//
// The payload is what the Send action says goes along: contents, or the tags of a store.
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
  std::vector<std::uint32_t> crcs;  // of the payload's pieces, cut where the chunk's blocks begin
};

std::vector<std::byte> encode(const Posted& posted);
// None for what no encode gives: unknown alternatives, wrong lengths, values that no message has.
std::optional<Posted> decode(std::span<const std::byte> table);

// The number by which the sender knows the answer to a message; 0 for an answer itself.
replica::Op asks(const replica::Message& message);

std::vector<std::byte> encode_tags(std::span<const store::Tagged> tags);
std::optional<std::vector<store::Tagged>> decode_tags(std::span<const std::byte> payload);

}  // namespace ff::fs3::io
