#include "fs3/client/batch.hpp"

#include <algorithm>
#include <bit>
#include <string>
#include <utility>

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
      throw Error(Code::invalid, "invalid range: offset " + std::to_string(range.offset) + ", " + std::to_string(range.bytes) +
                                     " bytes of file " + std::to_string(range.file));
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

}  // namespace ff::fs3::client
