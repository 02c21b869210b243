// Splits ranges of files into pieces of chunks.
//
// Thread contract: one thread at a time.
#pragma once

#include <cstdint>
#include <span>
#include <tuple>
#include <vector>

#include "fs3/io/client/piece.hpp"

namespace ff::fs3::client {

// A file's chunks: chunk i is on chain chains[i % chains.size()] (docs/guide/fs3.md).
struct FileMap {
  // Throws Code::invalid for an impossible chunk size, or without chains.
  FileMap(std::uint64_t inode, std::uint64_t chunk_size, std::vector<std::uint32_t> chains);
  std::uint64_t inode;
  unsigned chunk_bits;
  std::vector<std::uint32_t> chains;

  std::uint32_t chain(std::uint64_t index) const { return chains[index % chains.size()]; }
};

struct Range {
  std::size_t file;
  std::int64_t offset, bytes;
  std::byte* memory;
};

// Returns one piece for each chunk that a range touches, in order. Throws Code::invalid for ranges beyond a file's
// possible offsets.
std::vector<io::Piece> split(std::span<const FileMap* const> files, std::span<const Range> ranges);

// Pieces of one call, and the outcome of each.
struct Pieces {
  std::vector<io::Piece> pieces;

  // (piece, outcome, chain, node asked) of each piece that is not ok.
  std::vector<std::tuple<std::size_t, int, std::uint32_t, std::uint32_t>> failures() const;
  // Makes the next call retry piece `n` at `node`, unless the piece is ok. Throws Code::invalid if there is no piece
  // `n`.
  void again(std::size_t n, std::uint32_t node);
  std::uint64_t bytes() const;
  std::tuple<std::uint64_t, std::uint32_t> chunk(std::size_t n) const;
  // For pieces that were read: returns the inodes of files in which a requested byte belongs to no chunk.
  std::vector<std::uint64_t> holes() const;
  // Answers of QUERY_LAST: (index, run, length) of each piece.
  std::vector<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>> found() const;
  // For pieces that were read, in the order of `split`: returns the CRC32C of each range, which continues the value in
  // `starts`. `ranges`: bytes of each range. Throws Code::invalid for a piece that is not ok, or if the pieces were not
  // split from ranges of these lengths.
  std::vector<std::uint32_t> sums(std::span<const std::int64_t> ranges, std::span<const std::uint32_t> starts) const;
};

}  // namespace ff::fs3::client
