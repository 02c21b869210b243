#include "fs3/store/fill.hpp"

#include <algorithm>
#include <cstring>
#include <memory>

#include "base/crc/crc32c.hpp"
#include "fs3/store/core.hpp"

namespace ff::fs3::store {
namespace {

constexpr std::uint32_t kWindow = std::uint32_t{1} << 20;  // bytes of the chunk that are read and written at a time

std::vector<std::byte>& thread_buffer() {
  static thread_local std::vector<std::byte> buffer;
  return buffer;
}

Range block_at(std::uint32_t begin, std::uint32_t length) { return {begin, std::min(begin + kBlock32, length)}; }

}  // namespace

Fill::Fill(Core& core, const Filling& filling, const IndexEntry& base, IndexEntry& entry)
    : core_(core),
      filling_(filling),
      base_(base),
      entry_(entry),
      head_{0, std::min({base.length, filling.written.begin, entry.length})},
      gap_{base.length, filling.written.begin},
      written_(filling.written),
      tail_{filling.written.end, std::min(base.length, entry.length)},
      buffer_(thread_buffer()) {}

Status Fill::run() {
  if (filling_.fresh) return rewrite();
  if (entry_.length > base_.length) return append();
  if (entry_.length < base_.length) return shorten();
  entry_.crc = base_.crc;
  entry_.last_crc = base_.last_crc;
  return Status::ok;
}

// Reads the CRC table of the base. The table is valid if its CRCs combine to the CRC of the whole base, which the log
// keeps.
Status Fill::load_base_crcs() {
  base_crcs_ = core_.read_crcs(base_, 0, blocks_of(base_.length));
  std::uint32_t whole = 0;
  for (std::uint32_t i = 0; i < base_crcs_.size(); ++i)
    whole = crc32c_combine(whole, base_crcs_[i], block_at(i * kBlock32, base_.length).size());
  return whole == base_.crc ? Status::ok : Status::corrupt;
}

Status Fill::shorten() {
  if (load_base_crcs() != Status::ok) return Status::corrupt;
  const std::uint32_t last = blocks_of(entry_.length) - 1;
  std::uint32_t whole = 0;
  for (std::uint32_t i = 0; i < last; ++i) whole = crc32c_combine(whole, base_crcs_[i], kBlock);
  const Range block = block_at(last * kBlock32, entry_.length), old = block_at(last * kBlock32, base_.length);
  entry_.last_crc = base_crcs_[last];
  if (block.size() < old.size()) {
    buffer_.resize(kWindow);
    core_.read_bytes(base_.extent(), old.begin, buffer_.data(), old.size());
    if (crc32c(0, buffer_.data(), old.size()) != base_crcs_[last]) return Status::corrupt;
    entry_.last_crc = crc32c(0, buffer_.data(), block.size());
  }
  entry_.crc = crc32c_combine(whole, entry_.last_crc, block.size());
  return Status::ok;
}

std::uint32_t Fill::added(Range part) {
  const Range gap = part.cut(gap_), piece = part.cut(written_);
  std::uint32_t crc = gap.size() > 0 ? crc32c_zeros(0, gap.size()) : 0;
  if (piece.size() == 0) return crc;
  const std::uint32_t given = filling_.crcs.empty()
                                  ? crc32c(0, filling_.bytes.data() + (piece.begin - written_.begin), piece.size())
                                  : filling_.crcs[piece.begin / kBlock - written_.begin / kBlock];
  return crc32c_combine(crc, given, piece.size());
}

// Writes beyond the base's end in the base's extent. The base's bytes stay, and so does the base's part of the table.
Status Fill::append() {
  const std::uint32_t first = base_.length / kBlock32;
  const bool whole_blocks = base_.length % kBlock32 == 0;
  std::vector<std::uint32_t> crcs;
  if (whole_blocks) crcs.push_back(base_.last_crc);  // no longer the last block, so its CRC goes into the table
  entry_.crc = base_.crc;
  for (std::uint32_t begin = first * kBlock32; begin < entry_.length; begin += kBlock32) {
    const Range part = block_at(begin, entry_.length).cut({base_.length, entry_.length});
    const std::uint32_t crc = added(part);
    entry_.crc = crc32c_combine(entry_.crc, crc, part.size());
    crcs.push_back(part.begin > begin ? crc32c_combine(base_.last_crc, crc, part.size()) : crc);
  }
  entry_.last_crc = crcs.back();
  write({base_.length, entry_.length});
  write_table(whole_blocks ? first - 1 : first, crcs);
  return Status::ok;
}

Status Fill::rewrite() {
  if (written_.size() == entry_.length && entry_.length == entry_.extent().capacity()) return write_full();
  if (head_.size() + tail_.size() > 0 && load_base_crcs() != Status::ok) return Status::corrupt;
  std::vector<std::uint32_t> crcs;
  crcs.reserve(blocks_of(entry_.length));
  entry_.crc = 0;
  const std::uint32_t step = written_.size() == entry_.length ? entry_.length : kWindow;  // needs no bytes of the base
  for (std::uint32_t begin = 0; begin < entry_.length; begin += step) {
    const Range window{begin, std::min(begin + step, entry_.length)};
    if (copy_base(window) != Status::ok) return Status::corrupt;
    for (std::uint32_t at = begin; at < window.end; at += kBlock32) {
      const Range block = block_at(at, entry_.length);
      crcs.push_back(block_crc(block, window));
      entry_.crc = crc32c_combine(entry_.crc, crcs.back(), block.size());
    }
    write(window);
  }
  entry_.last_crc = crcs.back();
  write_table(0, crcs);
  return Status::ok;
}

// Writes the new bytes, which fill the extent, and the table behind them in one write.
Status Fill::write_full() {
  const std::uint32_t blocks = blocks_of(entry_.length);
  const std::size_t bytes = table_bytes(entry_.size_class);
  buffer_.resize(bytes + kBlock);
  void* place = buffer_.data();
  std::size_t room = buffer_.size();
  auto* const table = static_cast<std::byte*>(std::align(kBlock, bytes, place, room));
  std::memset(table, 0, bytes);
  entry_.crc = 0;
  for (std::uint32_t n = 0; n < blocks; ++n) {
    const std::uint32_t crc = added(block_at(n * kBlock32, entry_.length)), slot = crc ^ entry_.salt;
    entry_.crc = crc32c_combine(entry_.crc, crc, kBlock);
    if (n + 1 == blocks) entry_.last_crc = crc;
    else std::memcpy(table + 4 * std::size_t{n}, &slot, sizeof slot);
  }
  const std::span<const std::byte> parts[] = {filling_.bytes, {table, bytes}};
  core_.disk_.write_parts(core_.file_of(entry_.extent()), entry_.extent().position(), parts);
  return Status::ok;
}

Status Fill::copy_base(Range window) {
  for (const Range& part : {head_.cut(window), tail_.cut(window)}) {
    if (part.size() == 0) continue;
    // Reads whole blocks of the base, so that they can be verified. The two parts may share a block.
    const std::uint32_t first = part.begin / kBlock32, end = blocks_of(part.end);
    const std::uint32_t from = first * kBlock32, to = std::min(end * kBlock32, base_.length);
    buffer_.resize(kWindow);
    std::byte* const into = buffer_.data() + (from - window.begin);
    core_.read_bytes(base_.extent(), from, into, to - from);
    for (std::uint32_t i = first; i < end; ++i)
      if (crc32c(0, into + (i - first) * kBlock, block_at(i * kBlock32, base_.length).size()) != base_crcs_[i])
        return Status::corrupt;
  }
  return Status::ok;
}

std::uint32_t Fill::block_crc(Range block, Range window) {
  const Range head = block.cut(head_), tail = block.cut(tail_);
  const auto kept = [&](Range part) {
    const Range old = block_at(block.begin, base_.length);
    if (part.begin == old.begin && part.end == old.end) return base_crcs_[block.begin / kBlock];
    return crc32c(0, buffer_.data() + (part.begin - window.begin), part.size());
  };
  std::uint32_t crc = head.size() > 0 ? kept(head) : 0;
  const std::uint32_t between = block.size() - head.size() - tail.size();
  if (between > 0) crc = crc32c_combine(crc, added(block), between);
  if (tail.size() > 0) crc = crc32c_combine(crc, kept(tail), tail.size());
  return crc;
}

// Writes each part from its source; a gap of a whole window becomes a hole.
void Fill::write(Range window) {
  const File file = core_.file_of(entry_.extent());
  const std::uint64_t position = entry_.extent().position();
  const auto put = [&](Range part, const std::byte* from) {
    if (part.size() > 0) core_.disk_.write(file, position + part.begin, from, part.size());
  };
  const Range head = window.cut(head_), gap = window.cut(gap_), piece = window.cut(written_), tail = window.cut(tail_);
  if (filling_.fresh) put(head, buffer_.data() + (head.begin - window.begin));
  if (gap.size() >= kWindow) core_.disk_.punch(file, position + gap.begin, gap.size());
  else if (gap.size() > 0) put(gap, std::vector<std::byte>(gap.size()).data());
  put(piece, filling_.bytes.data() + (piece.begin - written_.begin));
  if (filling_.fresh) put(tail, buffer_.data() + (tail.begin - window.begin));
}

// Writes the CRCs of the blocks from `first` on to the table, except the last CRC, which the entry keeps.
void Fill::write_table(std::uint32_t first, const std::vector<std::uint32_t>& crcs) {
  if (crcs.size() < 2) return;
  std::vector<std::uint32_t> slots(crcs.begin(), crcs.end() - 1);
  for (std::uint32_t& slot : slots) slot ^= entry_.salt;
  core_.disk_.write(core_.file_of(entry_.extent()), entry_.extent().table() + 4 * std::uint64_t{first}, slots.data(),
                    4 * slots.size());
}

}  // namespace ff::fs3::store
