// Pieces of memory to copy into an arena, and their division into blocks of nearly equal size. A block may begin and
// end within a piece.
//
// Thread contract: immutable, hence thread-safe.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace ff::checkpoint {

struct Piece {
  const char* source;
  std::size_t offset;  // byte offset in the arena
  std::size_t bytes;
};

class Blocks {
 public:
  // Divides the pieces into blocks of `bytes` bytes. Throws Code::invalid unless the pieces are ordered by offset,
  // disjoint, and inside an arena of `arena` bytes.
  Blocks(std::vector<Piece> pieces, std::size_t arena, std::size_t bytes);

  std::size_t size() const { return begins_.size(); }
  const std::vector<Piece>& pieces() const { return pieces_; }
  // Returns the end of the arena's prefix that is in place once the first `blocks` blocks are in place.
  std::size_t staged(std::size_t blocks) const;
  // Returns the number of leading pieces that are in place once the first `blocks` blocks are in place.
  std::size_t pieces_done(std::size_t blocks) const;
  // Returns the number of leading blocks that hold the pieces' bytes in [0, upto) of the arena.
  std::size_t needed(std::size_t upto) const;

  // Calls part(piece, skip, bytes) for each part of a piece in the block, in order.
  template <class Part>
  void each_part(std::size_t block, Part part) const {
    auto [piece, skip] = begins_[block];
    for (std::size_t left = bytes_; left > 0 && piece < pieces_.size(); ++piece, skip = 0) {
      const std::size_t bytes = std::min(left, pieces_[piece].bytes - skip);
      if (bytes > 0) part(piece, skip, bytes);
      left -= bytes;
    }
  }

 private:
  struct Begin {
    std::size_t piece;  // the first piece in the block
    std::size_t skip;   // bytes of that piece in earlier blocks
  };

  const std::vector<Piece> pieces_;
  const std::size_t bytes_;  // size of a block
  std::vector<Begin> begins_;
};

}  // namespace ff::checkpoint
