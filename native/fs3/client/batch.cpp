#include "fs3/client/batch.hpp"

#include <algorithm>
#include <bit>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/crc/crc32c.hpp"
#include "base/error.hpp"

namespace ff::fs3::client {

FileMap::FileMap(std::uint64_t number, std::uint64_t chunk_size, std::vector<std::uint32_t> order)
    : inode(number), chunk_bits(static_cast<unsigned>(std::countr_zero(chunk_size))), chains(std::move(order)) {
  if (!std::has_single_bit(chunk_size) || chunk_size < kBlock || chunk_size > kLargestChunk || chains.empty())
    throw Error(Code::invalid, "invalid file: chunks of " + std::to_string(chunk_size) + " bytes on " +
                                   std::to_string(chains.size()) + " chains");
}

std::vector<io::Piece> split(std::span<const FileMap* const> files, std::span<const Range> ranges) {
  std::vector<io::Piece> pieces;
  pieces.reserve(ranges.size());
  for (const Range& range : ranges) {
    if (range.file >= files.size() || range.offset < 0 || range.bytes < 0 || range.offset > INT64_MAX - range.bytes)
      throw Error(Code::invalid, "invalid range: offset " + std::to_string(range.offset) + ", " +
                                     std::to_string(range.bytes) + " bytes of file " + std::to_string(range.file));
    const FileMap& file = *files[range.file];
    const std::uint64_t chunk_size = std::uint64_t{1} << file.chunk_bits;
    auto offset = static_cast<std::uint64_t>(range.offset), left = static_cast<std::uint64_t>(range.bytes);
    if (left != 0 && (offset + left - 1) >> file.chunk_bits > UINT32_MAX)
      throw Error(Code::invalid, "byte " + std::to_string(offset + left - 1) + " is beyond the last chunk of a file");
    for (std::byte* memory = range.memory; left != 0;) {
      const std::uint64_t index = offset >> file.chunk_bits, within = offset & (chunk_size - 1);
      const std::uint64_t bytes = std::min(left, chunk_size - within);
      io::Piece& piece = pieces.emplace_back();
      piece.chunk = {file.inode, static_cast<std::uint32_t>(index)};
      piece.chain = file.chain(index);
      piece.offset = static_cast<std::uint32_t>(within);
      piece.length = static_cast<std::uint32_t>(bytes);
      piece.memory = memory;
      offset += bytes;
      left -= bytes;
      memory += bytes;
    }
  }
  return pieces;
}

std::vector<std::tuple<std::size_t, int, std::uint32_t, std::uint32_t>> Pieces::failures() const {
  std::vector<std::tuple<std::size_t, int, std::uint32_t, std::uint32_t>> failed;
  for (std::size_t n = 0; n < pieces.size(); ++n) {
    const io::Piece& piece = pieces[n];
    if (piece.outcome != io::Outcome::ok)
      failed.emplace_back(n, static_cast<int>(piece.outcome), piece.chain, piece.asked);
  }
  return failed;
}

void Pieces::again(std::size_t n, std::uint32_t node) {
  if (n >= pieces.size()) throw Error(Code::invalid, "invalid piece " + std::to_string(n));
  if (pieces[n].outcome == io::Outcome::ok) return;
  pieces[n].outcome = io::Outcome::open;
  pieces[n].choice = node;
}

std::uint64_t Pieces::bytes() const {
  std::uint64_t sum = 0;
  for (const io::Piece& piece : pieces) sum += piece.length;
  return sum;
}

std::tuple<std::uint64_t, std::uint32_t> Pieces::chunk(std::size_t n) const {
  return {pieces.at(n).chunk.inode, pieces.at(n).chunk.index};
}

std::vector<std::uint64_t> Pieces::holes() const {
  std::vector<std::uint64_t> inodes;
  for (const io::Piece& piece : pieces) {
    const bool whole = piece.chunk_length >= std::uint64_t{piece.offset} + piece.length;
    if (!whole && (inodes.empty() || inodes.back() != piece.chunk.inode)) inodes.push_back(piece.chunk.inode);
  }
  std::sort(inodes.begin(), inodes.end());
  inodes.erase(std::unique(inodes.begin(), inodes.end()), inodes.end());
  return inodes;
}

std::vector<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>> Pieces::found() const {
  std::vector<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>> answers;
  answers.reserve(pieces.size());
  for (const io::Piece& piece : pieces) answers.emplace_back(piece.found, piece.run, piece.chunk_length);
  return answers;
}

std::vector<std::uint32_t> Pieces::sums(std::span<const std::int64_t> ranges,
                                        std::span<const std::uint32_t> starts) const {
  if (ranges.size() != starts.size())
    throw Error(Code::invalid,
                std::to_string(ranges.size()) + " ranges and " + std::to_string(starts.size()) + " starts");
  std::vector<std::uint32_t> crcs(starts.begin(), starts.end());
  std::size_t next = 0;
  for (std::size_t n = 0; n < ranges.size(); ++n) {
    for (std::int64_t left = ranges[n]; left > 0; ++next) {
      if (next == pieces.size() || pieces[next].length > left || pieces[next].outcome != io::Outcome::ok)
        throw Error(Code::invalid, "range " + std::to_string(n) + " was not read");
      crcs[n] = crc32c_combine(crcs[n], pieces[next].crc, pieces[next].length);
      left -= pieces[next].length;
    }
  }
  return crcs;
}

}  // namespace ff::fs3::client
