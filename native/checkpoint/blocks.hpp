// Pieces of memory on their way into an arena, and the blocks in which they get there: about equally large, each from
// a place in a piece to the next block's.
//
// Thread contract: immutable; any number of threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace ff::checkpoint {

struct Piece {
  const char* source;
  std::size_t offset;  // in the arena
  std::size_t bytes;
};

class Blocks {
 public:
  // Throws Code::invalid unless the pieces are in the order of their offsets, without overlap, inside the `arena` bytes.
  Blocks(std::vector<Piece> pieces, std::size_t arena, std::size_t bytes);

  std::size_t size() const { return begins_.size(); }
  const std::vector<Piece>& pieces() const { return pieces_; }
  // Where pieces' bytes are in place once so many blocks are.
  std::size_t staged(std::size_t blocks) const;
  // The first so many pieces are in place then.
  std::size_t pieces_done(std::size_t blocks) const;
  // So many blocks hold the pieces' bytes in [0, upto) of the arena.
  std::size_t needed(std::size_t upto) const;

  // part(piece, skip, bytes) for each part of a piece in the block, in order.
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
    std::size_t piece;  // the first one
    std::size_t skip;   // bytes of it in earlier blocks
  };

  const std::vector<Piece> pieces_;
  const std::size_t bytes_;  // of a block
  std::vector<Begin> begins_;
};

}  // namespace ff::checkpoint
