// FFRecord v2 (docs/ffrecord-v2.md). Opening reads header, schema, slots and footer; a page of the mapped
// index is checked when one of its samples is first asked for.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ffrecord/record_file.hpp"

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

// One of the two places where the last commit is named.
struct V2Slot {
  std::uint32_t crc;
  std::uint32_t zero;
  std::int64_t commit;
  std::int64_t footer;  // its place
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

class V2File final : public RecordFile {
 public:
  // Takes the descriptor.
  V2File(std::string path, int fd);

  int version() const override { return 2; }
  std::int64_t count() const override { return commit_.samples; }
  Extent at(std::int64_t i) const override;
  std::int64_t unread(std::int64_t i) const override;
  std::string schema() const override { return schema_; }

  // What a writer needs that goes on behind the last commit.
  std::int64_t alignment() const { return alignment_; }
  const V2Slot& commit() const { return commit_; }
  const std::vector<Run>& runs() const { return runs_; }
  // The place of the slot of the last commit, and whether it has to be written again: the commit was found
  // by its footer.
  std::int64_t slot_place() const { return data_start_ - kPage * (2 - commit_.commit % 2); }
  bool slot_torn() const { return slot_torn_; }

 private:
  void load_header();
  void load_slots();
  bool valid(const unsigned char* page, int parity, V2Slot& slot) const;
  bool footer_at_end(std::int64_t commit);
  std::vector<Run> load_footer(const V2Slot& slot, std::string& wrong) const;
  // The run of sample i, and the number of its index page in that run.
  std::pair<std::size_t, std::int64_t> page_of(std::int64_t i) const;
  bool checked(std::int64_t page) const {
    return (checked_[page / 64].load(std::memory_order_relaxed) >> page % 64 & 1) != 0;
  }
  void check_page(const V2Page& page, const Run& run, std::int64_t in_run) const;

  std::int64_t alignment_ = 0;
  std::string schema_;
  std::int64_t data_start_ = 0;  // first byte behind the slots
  V2Slot commit_{};
  bool slot_torn_ = false;
  std::vector<Run> runs_;
  std::vector<std::int64_t> first_pages_;  // number of each run's first page, counted over all runs
  // A bit for each page that was checked; pages may be checked twice by two threads.
  std::unique_ptr<std::atomic<std::uint64_t>[]> checked_;
};

}  // namespace ff::ffrecord
