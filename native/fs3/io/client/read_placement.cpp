#include "fs3/io/client/read_placement.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/crc/crc32c.hpp"

namespace ff::fs3::io {
namespace {

constexpr std::uint64_t down(std::uint64_t offset) { return offset / kBlock * kBlock; }
constexpr std::uint64_t up(std::uint64_t offset) { return down(offset + kBlock - 1); }

}  // namespace

bool ReadPlacement::fits(const ReadAnswer& answer, const Piece& piece) const {
  if (answer.status > Status::invalid) return false;
  if (answer.status != Status::ok) return answer.length == 0;
  if (answer.length == 0) return answer.chunk_length <= piece.offset;
  const std::uint64_t end =
      std::min<std::uint64_t>(up(std::uint64_t{piece.offset} + piece.length), answer.chunk_length);
  return answer.offset == down(piece.offset) && std::uint64_t{answer.offset} + answer.length == end;
}

bool ReadPlacement::begin(const Head& head, std::vector<std::byte> table, std::span<Piece* const> pieces) {
  if (head.count != pieces.size() || !sound_read_answer(head, table)) return false;
  answers_.clear();
  for (std::size_t n = 0; n < pieces.size(); ++n) {
    answers_.push_back(at<ReadAnswer>(table, n));
    if (!fits(answers_.back(), *pieces[n])) return false;
  }
  table_ = std::move(table);
  pieces_.assign(pieces.begin(), pieces.end());
  crc_at_ = pieces_.size() * sizeof(ReadAnswer);
  at_ = position_ = came_ = scratched_ = 0;
  holds_ = true;
  sum_ = 0;
  next_piece();
  return true;
}

void ReadPlacement::next_piece() {
  for (; at_ < pieces_.size(); ++at_, position_ = 0, holds_ = true, sum_ = 0) {
    const ReadAnswer& answer = answers_[at_];
    if (position_ < answer.length) return;
    Piece& piece = *pieces_[at_];
    piece.version = answer.version;
    piece.chunk_length = answer.status == Status::ok ? answer.chunk_length : 0;
    if (answer.status != Status::ok && answer.status != Status::not_found) {
      piece.outcome = static_cast<Outcome>(answer.status);
      continue;
    }
    const std::uint32_t has = std::clamp(piece.chunk_length, piece.offset, piece.offset + piece.length) - piece.offset;
    if (has < piece.length) std::memset(piece.memory + has, 0, piece.length - has);
    piece.crc = crc32c_zeros(sum_, piece.length - has);
    piece.outcome = holds_ ? Outcome::ok : Outcome::mismatch;
  }
}

ReadPlacement::Block ReadPlacement::block(std::size_t piece, std::size_t position) const {
  const ReadAnswer& answer = answers_[piece];
  const Piece& wanted = *pieces_[piece];
  const std::size_t bytes = std::min(kBlock, answer.length - position);
  const std::uint64_t begin = answer.offset + position;
  const bool whole = begin >= wanted.offset && begin + bytes <= std::uint64_t{wanted.offset} + wanted.length;
  return {bytes, whole ? wanted.memory + (begin - wanted.offset) : nullptr};
}

std::span<const iovec> ReadPlacement::places(std::size_t end) {
  parts_.clear();
  std::size_t left = kAtOnce, skip = came_, ordinal = scratched_;
  for (std::size_t piece = at_, position = position_; piece < end; ++piece, position = 0) {
    for (; position < answers_[piece].length; position += kBlock) {
      auto [bytes, place] = block(piece, position);
      if (left < bytes || parts_.size() == kParts) return parts_;
      left -= bytes;
      if (!place) {
        if (scratch_.empty()) scratch_.resize(kParts * kBlock);
        place = scratch(ordinal++);
      }
      place += skip;
      bytes -= std::exchange(skip, 0);
      auto* const last = parts_.empty() ? nullptr : &parts_.back();
      if (last && static_cast<std::byte*>(last->iov_base) + last->iov_len == place) last->iov_len += bytes;
      else parts_.push_back({place, bytes});
    }
  }
  return parts_;
}

void ReadPlacement::landed(std::size_t bytes) {
  while (bytes != 0) {
    const auto [size, place] = block(at_, position_);
    const std::size_t step = std::min(bytes, size - came_);
    bytes -= step;
    came_ += step;
    if (came_ < size) return;
    came_ = 0;
    const std::byte* const from = place ? place : scratch(scratched_++);
    const std::uint32_t crc = compare(from, size);
    if (place) sum_ = crc32c_combine(sum_, crc, size);
    else keep_part(from, size);
    position_ += size;
    next_piece();
  }
}

std::vector<ReadPlacement> ReadPlacement::split() {
  std::vector<ReadPlacement> parts(pieces_.size());
  std::size_t crcs = pieces_.size() * sizeof(ReadAnswer);
  for (std::size_t n = 0; n < parts.size(); ++n) {
    const std::size_t bytes = answers_[n].crcs * sizeof(std::uint32_t);
    const Place its = place(n);
    std::vector<std::byte>& table = parts[n].table_;
    table.resize(sizeof(ReadAnswer) + bytes + sizeof its);
    std::memcpy(table.data(), &answers_[n], sizeof(ReadAnswer));
    std::memcpy(table.data() + sizeof(ReadAnswer), table_.data() + crcs, bytes);
    std::memcpy(table.data() + sizeof(ReadAnswer) + bytes, &its, sizeof its);
    crcs += bytes;
    parts[n].answers_ = {answers_[n]};
    parts[n].pieces_ = {pieces_[n]};
    parts[n].crc_at_ = sizeof(ReadAnswer);
    parts[n].next_piece();
  }
  at_ = pieces_.size();
  return parts;
}

std::uint32_t ReadPlacement::compare(const std::byte* block, std::size_t size) {
  std::uint32_t crc;
  std::memcpy(&crc, table_.data() + crc_at_, sizeof crc);
  crc_at_ += sizeof crc;
  const std::uint32_t own = crc32c(0, block, size);
  if (own != crc) holds_ = false;
  return own;
}

void ReadPlacement::keep_part(const std::byte* scratch, std::size_t size) {
  const Piece& piece = *pieces_[at_];
  const std::uint64_t block = answers_[at_].offset + position_;
  const std::uint64_t begin = std::max<std::uint64_t>(block, piece.offset);
  const std::uint64_t end = std::min(block + size, std::uint64_t{piece.offset} + piece.length);
  if (begin >= end) return;
  std::memcpy(piece.memory + (begin - piece.offset), scratch + (begin - block), end - begin);
  sum_ = crc32c(sum_, scratch + (begin - block), end - begin);
}

}  // namespace ff::fs3::io
