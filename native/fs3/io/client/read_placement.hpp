// Destinations of the bytes of a READ's answer: a whole wanted block goes straight to its place, a partly wanted one
// through scratch memory. Pure: the socket's owner asks for places, fills them and reports how many bytes came.
//
// Thread contract: one thread at a time.
// Invariants
//   - Each block is compared with its CRC as soon as it came whole. The bytes are then in the first or second cache of
//     the core that copied them; at the end of a piece they would come from a slower one, or from another core.
//   - A piece has an outcome once all its bytes came: ok or mismatch, with zeros where the chunk has no bytes; or the
//     status that the answer gives. All other pieces are `open`.
//   - `crc` of an ok piece is joined from the CRCs that its blocks were compared with, so no byte of a whole block is
//     summed twice; of a partly wanted block the wanted part is summed again, while it is in scratch memory.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <span>
#include <vector>

#include "fs3/io/client/piece.hpp"

namespace ff::fs3::io {

class ReadPlacement {
 public:
  static constexpr std::size_t kAtOnce = std::size_t{256} << 10;  // bytes: at most the second cache of a core
  static constexpr std::size_t kParts = 192;                      // iovecs in one call of `places`

  // Takes the table of a sound answer to these pieces. Returns false, and changes nothing, if it does not answer them.
  bool begin(const Head& head, std::vector<std::byte> table, std::span<Piece* const> pieces);
  // Returns where the next bytes go, in order; empty if all came. Valid until `landed`.
  std::span<const iovec> places() { return places(pieces_.size()); }
  // The same for the next piece alone; `place` tells where its first byte is in its file. REQUIRES: a local answer.
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
  std::vector<ReadPlacement> split();
  bool done() const { return at_ == pieces_.size(); }

 private:
  struct Block {
    std::size_t bytes;
    std::byte* place;  // null: goes through scratch
  };
  std::span<const iovec> places(std::size_t end);  // of the pieces before `end`
  Block block(std::size_t piece, std::size_t position) const;
  bool fits(const ReadAnswer& answer, const Piece& piece) const;
  std::uint32_t compare(const std::byte* block, std::size_t size);  // against the next CRC; returns its own
  void keep_part(const std::byte* scratch, std::size_t size);
  void next_piece();  // goes to the next piece that still expects bytes, and completes those before it
  std::byte* scratch(std::size_t ordinal) { return scratch_.data() + ordinal % kParts * kBlock; }

  std::vector<std::byte> table_;
  std::vector<Piece*> pieces_;
  std::vector<ReadAnswer> answers_;
  std::vector<std::byte> scratch_;  // made when first needed
  std::vector<iovec> parts_;
  std::size_t at_ = 0;          // index of the current piece
  std::size_t position_ = 0;    // where the current block begins, in its bytes
  std::size_t came_ = 0;        // bytes of the current block
  std::size_t crc_at_ = 0;      // offset of its CRC in the table
  std::size_t scratched_ = 0;   // blocks that went through scratch
  bool holds_ = true;           // false: a CRC of the current piece did not match
  std::uint32_t sum_ = 0;       // CRC32C of its bytes so far
};

}  // namespace ff::fs3::io
