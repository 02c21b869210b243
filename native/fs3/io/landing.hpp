// Where the bytes of a READ's answer go: straight to their place where a block is wanted whole, by way of scratch where
// only part of it is. Pure: whoever has the socket asks for places, fills them and says how much came.
//
// Thread contract: one thread at a time.
// Invariants
//   - Each block is compared with its CRC as soon as it came whole. The bytes are then in the first or second cache of
//     the core that copied them there; at the end of a piece they would come from a slower one, or from another core.
//   - A piece has an outcome once all its bytes came: ok or mismatch, with zeros where the chunk has no bytes; or what
//     the answer says of it. Others are `open`.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <span>
#include <vector>

#include "fs3/io/piece.hpp"

namespace ff::fs3::io {

class Landing {
 public:
  static constexpr std::size_t kAtOnce = std::size_t{256} << 10;  // bytes: no more than the second cache of a core
  static constexpr std::size_t kParts = 192;                      // of those

  // The table of a sound answer to these pieces. False if that is no answer to them; nothing was changed then.
  bool begin(const Head& head, std::vector<std::byte> table, std::span<Piece* const> pieces);
  // Where the next bytes go, in order; none if all came. Valid until `landed`.
  std::span<const iovec> places() { return places(pieces_.size()); }
  // The same, of the next piece alone, and where it has its first byte in the piece's file. REQUIRES: a local answer.
  std::span<const iovec> places_of_one() { return places(at_ + 1); }
  Place place(std::size_t piece) const {
    return fs3::io::at<Place>(table_, piece, table_.size() - pieces_.size() * sizeof(Place));
  }
  std::size_t piece() const { return at_; }
  std::size_t pieces() const { return pieces_.size(); }
  std::size_t position() const { return position_ + came_; }  // in the bytes of that piece
  std::size_t bytes(std::size_t piece) const { return answers_[piece].length; }
  void landed(std::size_t bytes);
  // Each piece in a landing of its own, which other threads may fill; this one is done then.
  // REQUIRES: a local answer of which nothing landed.
  std::vector<Landing> split();
  bool done() const { return at_ == pieces_.size(); }

 private:
  struct Block {
    std::size_t bytes;
    std::byte* place;  // null: scratch
  };
  std::span<const iovec> places(std::size_t end);  // of the pieces before that one
  Block block(std::size_t piece, std::size_t position) const;
  bool fits(const ReadAnswer& answer, const Piece& piece) const;
  void compare(const std::byte* block, std::size_t size);  // with the next CRC
  void keep_part(const std::byte* scratch, std::size_t size);
  void next_piece();  // from those that have nothing more to come to the next one
  std::byte* scratch(std::size_t ordinal) { return scratch_.data() + ordinal % kParts * kBlock; }

  std::vector<std::byte> table_;
  std::vector<Piece*> pieces_;
  std::vector<ReadAnswer> answers_;
  std::vector<std::byte> scratch_;  // made when first needed
  std::vector<iovec> parts_;
  std::size_t at_ = 0;          // piece
  std::size_t position_ = 0;    // in its bytes: where a block begins
  std::size_t came_ = 0;        // of the block there
  std::size_t crc_at_ = 0;      // of that block, in the table
  std::size_t scratched_ = 0;   // blocks that went by way of scratch
  bool holds_ = true;           // so far, of the piece
};

}  // namespace ff::fs3::io
