#include "fs3/io/wire/wire.hpp"

#include <algorithm>

#include "base/crc/crc32c.hpp"

namespace ff::fs3::io {
namespace {

std::size_t entry_bytes(FrameKind kind) {
  switch (kind) {
    case FrameKind::read: return sizeof(ReadEntry);
    case FrameKind::read_answer: return sizeof(ReadAnswer);
    case FrameKind::write: return sizeof(WriteEntry);
    case FrameKind::write_answer: return sizeof(WriteAnswer);
    case FrameKind::query_last: return sizeof(QueryEntry);
    case FrameKind::query_answer: return sizeof(QueryAnswer);
    case FrameKind::report: return sizeof(ReadEntry);
    case FrameKind::message: return 0;  // entries of several sizes
    case FrameKind::ready:
    case FrameKind::go: return 0;
  }
  return 0;
}

bool known(FrameKind kind) { return kind >= FrameKind::read && kind <= FrameKind::go; }

bool carries_crcs(FrameKind kind) {
  return kind == FrameKind::write || kind == FrameKind::read_answer || kind == FrameKind::message;
}

bool carries_payload(FrameKind kind) { return carries_crcs(kind); }

bool within_chunk(std::uint32_t offset, std::uint32_t length) {
  return std::uint64_t{offset} + length <= kLargestChunk;
}

}  // namespace

bool sound(const Head& head) {
  if (head.magic != kMagic || !known(head.kind) || head.count == 0 || head.count > kMostEntries) return false;
  if ((head.kind == FrameKind::ready || head.kind == FrameKind::go) && head.count != 1) return false;
  const std::size_t entries = head.count * entry_bytes(head.kind);
  if (head.table_bytes < entries || head.table_bytes > kMostTable) return false;
  if (!carries_crcs(head.kind) && head.table_bytes != entries) return false;
  const std::size_t most =
      head.count == 1 || head.kind == FrameKind::message ? kLargestChunk : kMostPayload + 2 * kBlock * head.count;
  return head.payload_bytes <= (carries_payload(head.kind) ? most : 0);
}

bool holds(std::span<const std::byte> bytes, std::uint32_t offset, std::span<const std::byte> crcs) {
  if (crcs.size() != pieces(offset, static_cast<std::uint32_t>(bytes.size())) * sizeof(std::uint32_t)) return false;
  std::size_t from = 0;
  for (std::size_t n = 0; from < bytes.size(); ++n) {
    const std::size_t step = std::min(kBlock - (offset + from) % kBlock, bytes.size() - from);
    if (crc32c(0, bytes.data() + from, step) != at<std::uint32_t>(crcs, n)) return false;
    from += step;
  }
  return true;
}

bool sound_read(const Head& head, std::span<const std::byte> table) {
  std::uint64_t sum = 0;
  for (std::size_t n = 0; n < head.count; ++n) {
    const auto entry = at<ReadEntry>(table, n);
    if (!within_chunk(entry.offset, entry.length) || entry.uncommitted > 1) return false;
    sum += entry.length;
  }
  return head.count == 1 || sum <= kMostPayload;
}

bool sound_write(const Head& head, std::span<const std::byte> table) {
  std::uint64_t crcs = 0, bytes = 0;
  for (std::size_t n = 0; n < head.count; ++n) {
    const auto entry = at<WriteEntry>(table, n);
    if (!within_chunk(entry.offset, entry.length) || entry.kind > Kind::remove) return false;
    const bool filled = entry.kind == Kind::write;
    if (entry.crcs != (filled ? pieces(entry.offset, entry.length) : 0)) return false;
    crcs += entry.crcs;
    bytes += filled ? entry.length : 0;
  }
  return head.table_bytes == head.count * sizeof(WriteEntry) + crcs * sizeof(std::uint32_t) &&
         head.payload_bytes == bytes && (head.count == 1 || bytes <= kMostPayload);
}

bool sound_read_answer(const Head& head, std::span<const std::byte> table) {
  const bool local = (head.flags & kLocal) != 0;
  std::uint64_t crcs = 0, bytes = 0;
  for (std::size_t n = 0; n < head.count; ++n) {
    const auto entry = at<ReadAnswer>(table, n);
    if (!within_chunk(entry.offset, entry.length) || entry.offset % kBlock != 0) return false;
    if (entry.crcs != pieces(entry.offset, entry.length)) return false;
    if (entry.length > 0 && std::uint64_t{entry.offset} + entry.length > entry.chunk_length) return false;
    if (entry.status != Status::ok && entry.length != 0) return false;
    crcs += entry.crcs;
    bytes += entry.length;
  }
  const std::size_t places = head.count * sizeof(ReadAnswer) + crcs * sizeof(std::uint32_t);
  if (!local) return head.table_bytes == places && head.payload_bytes == bytes;
  if (head.table_bytes != places + head.count * sizeof(Place) || head.payload_bytes != 0) return false;
  for (std::size_t n = 0; n < head.count; ++n) {
    const auto place = at<Place>(table, n, places);
    if (place.slot >= kLocalSlots || place.fresh > 1 || place.position > std::uint64_t{1} << 62) return false;
  }
  return true;
}

bool sound_query_answer(const QueryAnswer& answer, std::uint32_t upto, std::uint32_t stride) {
  if (answer.status != Status::ok) return answer.status <= Status::invalid;
  if (answer.run == 0 || answer.run > kMostRun || (stride == 0 && answer.run != 1)) return false;
  return answer.index <= upto && std::uint64_t{answer.run - 1} * stride <= answer.index;
}

}  // namespace ff::fs3::io
