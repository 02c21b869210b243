// Writes the bytes and the CRC table of a chunk's new version into its extent. The base is the committed version that
// the new version changes.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "fs3/store/layout/index.hpp"

namespace ff::fs3::store {

class Core;

struct Range {
  std::uint32_t begin = 0, end = 0;
  std::uint32_t size() const { return end > begin ? end - begin : 0; }
  Range cut(Range to) const { return {begin > to.begin ? begin : to.begin, end < to.end ? end : to.end}; }
};

inline constexpr std::uint32_t kBlock32 = static_cast<std::uint32_t>(kBlock);
inline constexpr std::uint32_t blocks_of(std::uint64_t bytes) {
  return static_cast<std::uint32_t>((bytes + kBlock - 1) / kBlock);
}

struct Filling {
  // The range of the chunk that `bytes` fill; without bytes it is empty, at the chunk's new end. Zeros fill the chunk
  // between the base's end and this range.
  Range written;
  std::span<const std::byte> bytes;
  std::span<const std::uint32_t> crcs;  // as in Apply
  bool fresh = false;                   // the version has a new extent; else the base's extent
};

// Builds one version of a chunk, once. Its parts, in order: bytes of the base (`head`), zeros (`gap`), the caller's
// bytes (`written`), bytes of the base again (`tail`). A block's CRC is combined from the CRCs of its parts. Bytes that
// came with a CRC keep that CRC; bytes of the base are verified before they are copied.
class Fill {
 public:
  // `entry` has its length, extent and salt, and receives its CRCs. REQUIRES: entry.length > 0.
  Fill(Core& core, const Filling& filling, const IndexEntry& base, IndexEntry& entry);
  Status run();  // ok or corrupt; throws Error

 private:
  Status shorten();
  Status append();
  Status rewrite();
  Status write_full();
  Status load_base_crcs();
  Status copy_base(Range window);   // reads into buffer_ and verifies the base's blocks that `window` needs
  std::uint32_t added(Range part);  // CRC of the zeros and the caller's bytes in `part`, a part of one block
  std::uint32_t block_crc(Range block, Range window);  // CRC of a block that rewrite() writes
  void write(Range window);                            // writes gap, caller's bytes and the bytes that copy_base read
  void write_table(std::uint32_t first, const std::vector<std::uint32_t>& crcs);

  Core& core_;
  const Filling& filling_;
  const IndexEntry& base_;
  IndexEntry& entry_;
  const Range head_, gap_, written_, tail_;
  std::vector<std::uint32_t> base_crcs_;  // CRCs of all blocks of the base, if they are needed
  std::vector<std::byte>& buffer_;        // bytes of the current window, or the CRC table
};

}  // namespace ff::fs3::store
