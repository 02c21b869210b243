#include "ffrecord/format/v2_index.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "base/crc/crc32.hpp"
#include "base/error.hpp"

namespace ff::ffrecord {
namespace {

constexpr std::int64_t kMaxSchema = std::int64_t{1} << 20;
constexpr std::int64_t kMaxAlignment = std::int64_t{1} << 20;
// A zstd block of 4 bytes holds at most 128 KiB.
constexpr std::int64_t kMaxExpansion = (128 << 10) / 4;

std::int64_t whole_pages(std::int64_t bytes) { return (bytes + kPage - 1) / kPage; }
std::int64_t pages_of(std::int64_t entries) { return (entries + kPageEntries - 1) / kPageEntries; }

bool all_zero(const void* data, std::int64_t size) {
  const auto* const bytes = static_cast<const unsigned char*>(data);
  return std::all_of(bytes, bytes + size, [](unsigned char byte) { return byte == 0; });
}

// Returns whether `value`, whose first four bytes are a checksum, matches it.
bool sealed(const void* value, std::int64_t size) {
  std::uint32_t stored;
  std::memcpy(&stored, value, 4);
  return crc32(0, static_cast<const unsigned char*>(value) + 4, static_cast<std::size_t>(size - 4)) == stored;
}

}  // namespace

V2Index::V2Index(std::string name, std::int64_t size, const V2Bytes& bytes) : name_(std::move(name)), size_(size) {
  load_header(bytes);
  load_slots(bytes);
  for (const Run& run : runs_) {
    first_pages_.push_back(pages_);
    pages_ += pages_of(run.count);
  }
}

void V2Index::load_header(const V2Bytes& bytes) {
  const std::int64_t size = size_;
  if (size < 3 * kPage) corrupted(std::to_string(size) + " bytes are too few for a header");
  V2Header header;
  bytes.read(&header, sizeof header, 0);
  const std::uint32_t found = crc32(0, &header.version, sizeof header - 12);
  if (found != header.crc) corrupted("its header has checksum " + hex(found) + " instead of " + hex(header.crc));
  if (header.version != 2)
    throw Error(Code::storage, "cannot read record file '" + name_ + "': it has version " +
                                   std::to_string(header.version) + ", which needs a later Fireflyer");
  if (header.alignment < 8 || header.alignment > kMaxAlignment || !std::has_single_bit(header.alignment))
    corrupted("its header asks for an alignment of " + std::to_string(header.alignment));
  if (!all_zero(header.zero, sizeof header.zero)) corrupted("its header has bytes where zeros must be");
  alignment_ = static_cast<std::int64_t>(header.alignment);
  if (header.schema_bytes > kMaxSchema || static_cast<std::int64_t>(header.schema_bytes) > size - 3 * kPage)
    corrupted("its header claims a schema of " + std::to_string(header.schema_bytes) + " bytes");
  const std::int64_t schema_pages = whole_pages(static_cast<std::int64_t>(header.schema_bytes));
  data_start_ = kPage * (3 + schema_pages);
  if (data_start_ > size) corrupted(std::to_string(size) + " bytes are too few for its schema and slots");
  schema_.resize(static_cast<std::size_t>(schema_pages * kPage));
  if (!schema_.empty()) bytes.read(schema_.data(), schema_.size(), kPage);
  const std::size_t used = header.schema_bytes;
  if (crc32(0, schema_.data(), used) != header.schema_crc ||
      !all_zero(schema_.data() + used, static_cast<std::int64_t>(schema_.size() - used)))
    corrupted("its schema does not match its checksum");
  schema_.resize(used);
}

// Sets commit_ and runs_, or throws.
void V2Index::load_slots(const V2Bytes& bytes) {
  unsigned char pages[2 * kPage];
  bytes.read(pages, sizeof pages, data_start_ - 2 * kPage);
  V2Slot slots[2];
  const bool whole[2] = {valid(pages, 0, slots[0]), valid(pages + kPage, 1, slots[1])};
  if (!whole[0] && !whole[1]) corrupted("neither of its slots names a commit");
  const int last = whole[0] && (!whole[1] || slots[0].commit > slots[1].commit) ? 0 : 1;
  const int other = 1 - last;
  commit_ = slots[last];
  const bool settled = whole[other] ? slots[other].commit + 1 == commit_.commit
                                    : commit_.commit == 0 && all_zero(pages + other * kPage, kPage);
  if (!settled && !footer_at_end(commit_.commit + 1, bytes))
    corrupted("slot " + std::to_string(other) + " is damaged, and no later commit ends the file");
  if (commit_.end > size_) size_ = bytes.size();  // the commit was added after the size was read
  if (commit_.end > size_)
    corrupted("its last commit ends at byte " + std::to_string(commit_.end) + ", the file at byte " +
              std::to_string(size_));
  std::string wrong;
  runs_ = load_footer(commit_, bytes, wrong);
  if (!wrong.empty()) corrupted("the footer of commit " + std::to_string(commit_.commit) + " " + wrong);
}

// Returns whether the page is a valid slot for commits of this parity.
bool V2Index::valid(const unsigned char* page, int parity, V2Slot& slot) const {
  std::memcpy(&slot, page, sizeof slot);
  return sealed(&slot, sizeof slot) && slot.zero == 0 && all_zero(slot.zeros, sizeof slot.zeros) &&
         all_zero(page + sizeof slot, kPage - static_cast<std::int64_t>(sizeof slot)) && slot.samples >= 0 &&
         slot.commit >= 0 && slot.commit < INT64_MAX && slot.commit % 2 == parity;
}

// Accepts commit number `commit` as the last commit if that commit's footer ends the file. Then a crash tore the
// commit's slot while it was written, and everything else of the commit was on disk before.
bool V2Index::footer_at_end(std::int64_t commit, const V2Bytes& bytes) {
  const std::int64_t end = size_ = bytes.size();
  const std::int64_t place = (end - 1) / kPage * kPage;
  V2FooterHead head;
  const auto size = static_cast<std::int64_t>(sizeof head);
  if (place < commit_.end || end - place < size) return false;
  bytes.read(&head, sizeof head, place);
  if (head.commit != commit || end - place != size + std::int64_t{head.runs} * 24) return false;
  V2Slot slot{0, 0, commit, place, end - place, end, -1, {0, 0}};
  std::string wrong;
  const std::vector<Run> runs = load_footer(slot, bytes, wrong);
  if (!wrong.empty() || runs.empty()) return false;
  slot.samples = runs.back().first + runs.back().count;
  slot_torn_ = true;
  commit_ = slot;
  return true;
}

// Reads the footer that `slot` names, and returns its runs. If the bytes are not that footer, sets `wrong` to the
// reason. If slot.samples is -1, does not compare the number of samples.
std::vector<Run> V2Index::load_footer(const V2Slot& slot, const V2Bytes& bytes, std::string& wrong) const {
  const auto head_bytes = static_cast<std::int64_t>(sizeof(V2FooterHead));
  if (slot.footer < data_start_ || slot.footer % kPage != 0 || slot.footer_bytes < head_bytes ||
      slot.footer_bytes > kPage || slot.footer > slot.end || slot.end - slot.footer != slot.footer_bytes) {
    wrong = "has no place in the file";
    return {};
  }
  unsigned char footer[kPage];
  bytes.read(footer, static_cast<std::size_t>(slot.footer_bytes), slot.footer);
  V2FooterHead head;
  std::memcpy(&head, footer, sizeof head);
  if (!sealed(footer, slot.footer_bytes)) wrong = "does not match its checksum";
  else if (head.commit != slot.commit || slot.footer_bytes != head_bytes + std::int64_t{head.runs} * 24)
    wrong = "belongs to another commit";
  if (!wrong.empty()) return {};
  std::vector<Run> runs(head.runs);
  if (!runs.empty()) std::memcpy(runs.data(), footer + head_bytes, runs.size() * sizeof(Run));
  std::int64_t samples = 0;
  for (const Run& run : runs) {
    const bool placed = run.place >= data_start_ && run.place < slot.footer && run.place % kPage == 0;
    if (!placed || run.first != samples || run.count <= 0 ||
        run.count > (slot.footer - run.place) / kPage * kPageEntries) {
      wrong = "has an impossible run of index pages";
      return {};
    }
    samples += run.count;
  }
  if (slot.samples >= 0 && samples != slot.samples) wrong = "has another number of samples than its slot";
  return runs;
}

V2Index::Place V2Index::place(std::int64_t i) const {
  std::size_t number = 0;  // linear search: most samples are in the first few runs
  while (number + 1 < runs_.size() && runs_[number + 1].first <= i) ++number;
  const Run& run = runs_[number];
  const std::int64_t in_run = (i - run.first) / kPageEntries;
  return {run.place + in_run * kPage, run.first + in_run * kPageEntries,
          std::min(kPageEntries, run.count - in_run * kPageEntries), first_pages_[number] + in_run};
}

Extent V2Index::entry(const V2Page& page, const Place& place, std::int64_t i) const {
  const Extent extent = page.entries[i - place.first];
  const bool inside = extent.offset >= data_start_ && extent.offset % alignment_ == 0 && extent.bytes >= 0 &&
                      extent.offset <= end() && extent.bytes <= end() - extent.offset;
  const bool plain = extent.codec == kPlain && extent.raw == extent.bytes;
  const bool packed = extent.codec == kZstd && extent.raw > 0 && extent.raw / kMaxExpansion <= extent.bytes;
  if (!inside || !(plain || packed))
    corrupted("the index entry of sample " + std::to_string(i) + " (" + std::to_string(extent.bytes) +
              " bytes at byte " + std::to_string(extent.offset) + ", codec " + std::to_string(extent.codec) +
              ") cannot be");
  return extent;
}

void V2Index::check(const V2Page& page, const Place& place) const {
  // Uses a copy, so that the checksum and the fields are those of the same bytes, even if another process writes to the
  // file.
  V2Page copy;
  std::memcpy(&copy, &page, sizeof copy);
  if (!sealed(&copy, kPage) || copy.used != place.used || copy.first != place.first || !all_zero(copy.zero, 16))
    corrupted("the index page of samples " + std::to_string(place.first) + " to " +
              std::to_string(place.first + place.used - 1) + ", at byte " + std::to_string(place.offset) +
              ", does not match its checksum or its place");
}

}  // namespace ff::ffrecord
