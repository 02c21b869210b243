// The metadata of a v2 file (docs/internals/ffrecord-v2.md), from any source of bytes: the valid commit, the index page
// of a sample, and the entries of a page. No other code parses this layout.
//
// Threads: immutable after the constructor. V2Index keeps no page, so its memory does not grow with the samples.
//
// Invariant: an Extent that entry() returns lies inside [0, end()), for any bytes given.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ffrecord/format/record_file.hpp"

namespace ff::ffrecord {

inline constexpr char kMagic[8] = {'\x89', 'F', 'F', 'R', 'E', 'C', '2', '\n'};
inline constexpr std::int64_t kPage = 4096;
inline constexpr std::int64_t kPageEntries = 127;

struct V2Header {
  char magic[8];
  std::uint32_t crc;
  std::uint32_t version;
  std::uint64_t alignment;
  std::uint64_t schema_bytes;
  std::uint32_t schema_crc;
  unsigned char zero[kPage - 36];
};
static_assert(sizeof(V2Header) == kPage);

// One of two slots that commits write in turn. The valid slot with the larger commit number names the last commit.
struct V2Slot {
  std::uint32_t crc;
  std::uint32_t zero;
  std::int64_t commit;
  std::int64_t footer;  // place of the footer
  std::int64_t footer_bytes;
  std::int64_t end;
  std::int64_t samples;
  std::int64_t zeros[2];
};
static_assert(sizeof(V2Slot) == 64);

struct V2FooterHead {  // followed by the runs
  std::uint32_t crc;
  std::uint32_t runs;
  std::int64_t commit;
};
static_assert(sizeof(V2FooterHead) == 16);

struct V2Page {
  std::uint32_t crc;
  std::uint32_t used;
  std::int64_t first;
  unsigned char zero[16];
  Extent entries[kPageEntries];
};
static_assert(sizeof(V2Page) == kPage);

// Access to the bytes of a file; both functions throw on failure.
struct V2Bytes {
  std::function<std::int64_t()> size;  // current size: called only when the file seems to have grown
  std::function<void(void* data, std::size_t size, std::int64_t offset)> read;
};

class V2Index {
 public:
  // Place of a sample's page.
  struct Place {
    std::int64_t offset;
    std::int64_t first;   // number of its first sample
    std::int64_t used;    // entries
    std::int64_t number;  // number of the page among all index pages, from 0
  };

  // Reads header, schema, slots and footer of the file that had `size` bytes. Throws Code::corrupted if they do not
  // match their checksums or the size of the file, Code::storage for another version of the format, and what `bytes`
  // throws. `name` stands for the file in messages. Does not keep `bytes`.
  V2Index(std::string name, std::int64_t size, const V2Bytes& bytes);

  std::int64_t count() const { return commit_.samples; }
  std::int64_t end() const { return commit_.end; }  // byte at which the last commit ends
  std::int64_t pages() const { return pages_; }
  const std::string& schema() const { return schema_; }
  std::int64_t alignment() const { return alignment_; }
  const V2Slot& commit() const { return commit_; }
  const std::vector<Run>& runs() const { return runs_; }
  // The place of the last commit's slot, and whether the slot must be rewritten because the commit was found by its
  // footer.
  std::int64_t slot_place() const { return data_start_ - kPage * (2 - commit_.commit % 2); }
  bool slot_torn() const { return slot_torn_; }

  // REQUIRES: 0 <= i < count().
  Place place(std::int64_t i) const;
  // Throws Code::corrupted unless `page`, the bytes at `place`, is the index page that belongs there. Other threads and
  // processes may write to `page` meanwhile.
  void check(const V2Page& page, const Place& place) const;
  // Returns the place of sample i according to its page; throws Code::corrupted if the page's value is impossible.
  Extent entry(const V2Page& page, const Place& place, std::int64_t i) const;

 private:
  void load_header(const V2Bytes& bytes);
  void load_slots(const V2Bytes& bytes);
  bool valid(const unsigned char* page, int parity, V2Slot& slot) const;
  bool footer_at_end(std::int64_t commit, const V2Bytes& bytes);
  std::vector<Run> load_footer(const V2Slot& slot, const V2Bytes& bytes, std::string& wrong) const;
  [[noreturn]] void corrupted(const std::string& what) const { damaged(name_, what); }

  std::string name_;
  std::int64_t size_;  // newest known size of the file, in bytes
  std::int64_t alignment_ = 0;
  std::string schema_;
  std::int64_t data_start_ = 0;  // first byte behind the slots
  V2Slot commit_{};
  bool slot_torn_ = false;
  std::vector<Run> runs_;
  std::vector<std::int64_t> first_pages_;  // number of each run's first page, counted over all runs
  std::int64_t pages_ = 0;
};

}  // namespace ff::ffrecord
