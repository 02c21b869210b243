// Destinations of the bytes of a READ's answer. A block that was requested whole goes straight into the caller's
// memory; a block that was requested in part goes through scratch memory. This class does no I/O: the socket's owner
// asks for places, fills them and reports how many bytes came.
//
// Thread contract: one thread at a time.
// Invariants
//   - Each block is compared with its CRC as soon as it is complete. The bytes are then in the L1 or L2 cache of the
//     core that copied them; later they would come from a slower cache, or from another core.
//   - A piece has an outcome once all its bytes have arrived: ok or mismatch, with zeros where the chunk has no bytes;
//     or the status that the answer gives. All other pieces are `open`.
//   - `crc` of an ok piece is combined from the CRCs with which its blocks were compared. So the CRC of a whole block
//     is computed once. For a block in scratch memory, the CRC of the requested part is computed again.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <span>
#include <vector>

#include "fs3/io/client/piece.hpp"

namespace ff::fs3::io {

class ReadPlacement {
 public:
  static constexpr std::size_t kAtOnce = std::size_t{256} << 10;  // bytes: at most the L2 cache of a core
  static constexpr std::size_t kParts = 192;                      // iovecs in one call of `places`

  // Takes the table of a sound answer. Returns false, and changes nothing, if it does not answer these pieces.
  bool begin(const Head& head, std::vector<std::byte> table, std::span<Piece* const> pieces);
  // Returns the places of the next bytes, in order; empty if all bytes have arrived. Valid until `landed`.
  std::span<const iovec> places() { return places(pieces_.size()); }
  // Returns the places of the next piece only; `place` gives the position of its first byte in its file. REQUIRES: a
  // local answer.
  std::span<const iovec> places_of_one() { return places(at_ + 1); }
  Place place(std::size_t piece) const {
    return fs3::io::at<Place>(table_, piece, table_.size() - pieces_.size() * sizeof(Place));
  }
  std::size_t piece() const { return at_; }
  std::size_t pieces() const { return pieces_.size(); }
  std::size_t position() const { return position_ + came_; }  // offset of the next byte in the bytes of piece()
  std::size_t bytes(std::size_t piece) const { return answers_[piece].length; }
  // Reports that the next `bytes` bytes are in their places. Compares each block that is now complete with its CRC.
  void landed(std::size_t bytes);
  // Returns a ReadPlacement for each piece, which other threads may fill; this object is then done. REQUIRES: a local
  // answer of which no byte has arrived.
  std::vector<ReadPlacement> split();
  bool done() const { return at_ == pieces_.size(); }

 private:
  struct Block {
    std::size_t bytes;
    std::byte* place;  // null: goes through scratch
  };
  std::span<const iovec> places(std::size_t end);  // the next places, for pieces before `end`
  Block block(std::size_t piece, std::size_t position) const;
  bool fits(const ReadAnswer& answer, const Piece& piece) const;
  // Compares a block with the next CRC of the table; returns the block's CRC.
  std::uint32_t compare(const std::byte* block, std::size_t size);
  void keep_part(const std::byte* scratch, std::size_t size);
  void next_piece();  // goes to the next piece that still expects bytes, and completes the pieces before it
  std::byte* scratch(std::size_t ordinal) { return scratch_.data() + ordinal % kParts * kBlock; }

  std::vector<std::byte> table_;
  std::vector<Piece*> pieces_;
  std::vector<ReadAnswer> answers_;
  std::vector<std::byte> scratch_;  // made when first needed
  std::vector<iovec> parts_;
  std::size_t at_ = 0;         // index of the current piece
  std::size_t position_ = 0;   // offset of the current block in the piece's bytes
  std::size_t came_ = 0;       // received bytes of the current block
  std::size_t crc_at_ = 0;     // offset of the block's CRC in the table
  std::size_t scratched_ = 0;  // blocks that went through scratch
  bool holds_ = true;          // false: a CRC of the current piece did not match
  std::uint32_t sum_ = 0;      // CRC32C of the current piece's bytes so far
};

}  // namespace ff::fs3::io
