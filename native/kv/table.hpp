// Sorted tables: blocks of records in the order of their keys, an index of the blocks, a trailer.
//
//   block    u32 CRC32C of the rest, records, u32 offset of each record, u32 number of records
//   index    u32 CRC32C of the rest, u32 number of blocks; for each block u64 offset, u32 bytes, u32 bytes of its last
//            key, the last key
//   trailer  "FFKVTBL1", u64 offset of the index, u64 bytes of the index, u32 CRC32C of these three
// A table holds at most one version of a key.
//
// A table does no I/O: it names the ranges of its file that it needs, and verifies the bytes that the caller supplies.
//
// Thread contract: the caller serialises all calls on tables that share a cache (Python: the GIL). Tables of a merge have
// a cache of their own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kv/record.hpp"

namespace ff::kv {

constexpr std::size_t kTrailer = 28;

class Block {
 public:
  // Throws Error(corrupted) unless the checksum holds and every record is whole.
  explicit Block(std::string bytes);
  std::size_t count() const { return count_; }
  std::size_t bytes() const { return bytes_.size(); }
  Record record(std::size_t at) const;
  std::size_t lower_bound(std::string_view key) const;  // first record whose key is at least `key`

 private:
  std::uint32_t offset(std::size_t at) const;
  std::string bytes_;
  std::size_t count_ = 0, offsets_ = 0;
};

class Table;

// Cache of blocks with a bound in bytes. Evicts by CLOCK: a block that was used since the hand's last visit stays.
class BlockCache {
 public:
  explicit BlockCache(std::size_t capacity) : capacity_(capacity) {}
  void added(const std::shared_ptr<Table>& table, std::size_t block, std::size_t bytes);
  std::size_t bytes() const { return bytes_; }

 private:
  struct Place {
    std::weak_ptr<Table> table;
    std::size_t block, bytes;
  };
  std::size_t capacity_, bytes_ = 0;
  std::deque<Place> turn_;
};

class Table : public std::enable_shared_from_this<Table> {
 public:
  Table(std::string name, std::string first, std::string last, std::uint64_t index_offset, std::uint64_t index_bytes,
        std::shared_ptr<BlockCache> cache);

  const std::string& name() const { return name_; }
  std::string_view first() const { return first_; }
  std::string_view last() const { return last_; }
  bool indexed() const { return !blocks_.empty(); }
  std::size_t count() const { return blocks_.size(); }

  // Returns (offset, bytes) of the range of the file to read. For block -1: the index and the trailer. Else this block,
  // and the missing blocks after it as long as the range has at most `most` bytes.
  std::pair<std::uint64_t, std::uint64_t> range(std::int64_t block, std::uint64_t most) const;
  // Takes bytes of the file from an offset that `range` returned. Throws Error(corrupted).
  void supply(std::uint64_t offset, std::string_view bytes);

  // REQUIRES: indexed(). First block whose last key is at least `key`; count() if there is none.
  std::size_t block_of(std::string_view key) const;
  std::shared_ptr<const Block> block(std::size_t at);  // nullptr: not in memory
  bool evict(std::size_t at);                          // false: the block was used since the last call, and stays

 private:
  struct Place {
    std::uint64_t offset;
    std::uint32_t bytes;
    bool used;
    std::string last;
    std::shared_ptr<const Block> block;
  };
  void take_index(std::string_view bytes);

  std::string name_, first_, last_;
  std::uint64_t index_offset_, index_bytes_;
  std::vector<Place> blocks_;
  std::shared_ptr<BlockCache> cache_;
};

// A range of a file that a call needs before it can go on.
struct Need {
  std::shared_ptr<Table> table;
  std::int64_t block;  // -1: the index
};

class TableBuilder {
 public:
  struct Whole {
    std::string bytes, first, last;
    std::uint64_t index_offset, index_bytes, records;
  };
  void add(const Record& record);  // REQUIRES: keys ascend
  std::size_t bytes() const { return file_.size() + block_.size(); }
  std::optional<Whole> finish();  // nullopt: no records. Afterwards the builder is empty

 private:
  void end_block();
  std::string file_, block_, index_, first_, last_;
  std::vector<std::uint32_t> offsets_;
  std::uint32_t blocks_ = 0;
  std::uint64_t records_ = 0;
};

}  // namespace ff::kv
