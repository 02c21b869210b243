// Where the bytes of a READ's answer go: straight to their place where a block is wanted whole, by way of scratch where
// only part of it is. Pure: whoever has the socket asks for places, fills them and says how much came.
//
// Thread contract: one thread at a time; but `compare_due` may run while another thread fills the places.
// Invariants
//   - Each block that came whole is compared with its CRC: at once if it is the last of its piece or went by way of
//     scratch, else by the next `compare_due`.
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
  static constexpr std::size_t kAtOnce = std::size_t{256} << 10;  // bytes: what came is still in the cache when compared
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
  bool done() const { return at_ == pieces_.size(); }
  std::size_t due() const { return due_bytes_; }  // bytes that landed and were not compared
  void compare_due();

 private:
  struct Block {
    std::size_t bytes;
    std::byte* place;  // null: scratch
  };
  std::span<const iovec> places(std::size_t end);  // of the pieces before that one
  Block block(std::size_t piece, std::size_t position) const;
  bool fits(const ReadAnswer& answer, const Piece& piece) const;
  struct Run {  // blocks that lie one behind the other, with their CRCs
    const std::byte* bytes;
    std::size_t size, crc_at;
  };
  void compare(Run run);
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
  std::vector<Run> due_;        // of the piece
  std::size_t due_bytes_ = 0;
  bool holds_ = true;           // so far, of the piece
};

}  // namespace ff::fs3::io
