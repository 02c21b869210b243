#include "checkpoint/blocks.hpp"

#include <string>

#include "base/error.hpp"

namespace ff::checkpoint {
namespace {

void check(const std::vector<Piece>& pieces, std::size_t size) {
  std::size_t end = 0;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    const bool fits = piece.offset >= end && piece.offset <= size && piece.bytes <= size - piece.offset;
    if (!fits || (piece.source == nullptr && piece.bytes > 0))
      throw Error(Code::invalid, "piece " + std::to_string(i) + " (" + std::to_string(piece.bytes) + " bytes at " +
                                     std::to_string(piece.offset) + ") does not follow the one before inside the " +
                                     std::to_string(size) + " bytes of the arena");
    end = piece.offset + piece.bytes;
  }
}

}  // namespace

Blocks::Blocks(std::vector<Piece> pieces, std::size_t arena, std::size_t bytes)
    : pieces_(std::move(pieces)), bytes_(bytes) {
  check(pieces_, arena);
  std::size_t filled = bytes_;  // bytes in the current block
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    for (std::size_t skip = 0; skip < pieces_[i].bytes;) {
      if (filled == bytes_) {
        begins_.push_back({i, skip});
        filled = 0;
      }
      const std::size_t step = std::min(bytes_ - filled, pieces_[i].bytes - skip);
      skip += step;
      filled += step;
    }
  }
}

std::size_t Blocks::staged(std::size_t blocks) const {
  if (blocks < begins_.size()) return pieces_[begins_[blocks].piece].offset + begins_[blocks].skip;
  return pieces_.empty() ? 0 : pieces_.back().offset + pieces_.back().bytes;
}

std::size_t Blocks::pieces_done(std::size_t blocks) const {
  return blocks < begins_.size() ? begins_[blocks].piece : pieces_.size();
}

std::size_t Blocks::needed(std::size_t upto) const {
  const auto reaches = [this](const Begin& begin, std::size_t end) {
    return pieces_[begin.piece].offset + begin.skip < end;
  };
  return static_cast<std::size_t>(std::lower_bound(begins_.begin(), begins_.end(), upto, reaches) - begins_.begin());
}

}  // namespace ff::checkpoint
