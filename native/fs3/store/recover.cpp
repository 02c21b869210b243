// Opening: identity, the newest snapshot, the logs behind it, then a new log. docs/fs3-store.md, "End or damage".
#include <algorithm>
#include <charconv>
#include <cstring>
#include <random>
#include <unordered_set>

#include "base/crc32c.hpp"
#include "base/error.hpp"
#include "fs3/store/core.hpp"

namespace ff::fs3::store {
namespace {

constexpr std::uint32_t kFormat = 1;

struct IdentityFile {
  std::uint64_t magic = 0x45524f5453334646;  // "FF3STORE"
  std::uint32_t format = kFormat;
  std::uint32_t target = 0, chain = 0;
  std::uint32_t block = static_cast<std::uint32_t>(kBlock);
  std::uint64_t salt = 0;
  std::uint32_t zero = 0;
  std::uint32_t crc = 0;  // of all before
};
static_assert(sizeof(IdentityFile) == 40);

// Numbers of the files whose names begin with `prefix`, ascending.
std::vector<std::uint64_t> numbers(const std::vector<std::string>& names, std::string_view prefix) {
  std::vector<std::uint64_t> found;
  for (const std::string& name : names) {
    std::uint64_t number = 0;
    const char* const end = name.data() + name.size();
    if (name.starts_with(prefix) && std::from_chars(name.data() + prefix.size(), end, number).ptr == end)
      found.push_back(number);
  }
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace

// False: there is none that holds. Throws Error(invalid) for another's.
bool Core::read_identity() {
  const File file = disk_.open("identity", false);
  if (file == kNoFile) return false;
  IdentityFile read;
  std::size_t got = 0;
  try {
    got = disk_.read(file, 0, &read, sizeof read);
  } catch (const Error&) {
    disk_.close(file);
    throw;
  }
  disk_.close(file);
  if (got < sizeof read || read.magic != IdentityFile{}.magic || crc32c(0, &read, sizeof read - 4) != read.crc)
    return false;
  if (read.format != kFormat || read.block != kBlock)
    throw Error(Code::invalid, "this chunk store has format " + std::to_string(read.format) + ", known is " + std::to_string(kFormat));
  if (Identity{read.target, read.chain} != identity_)
    throw Error(Code::invalid, "this is target " + std::to_string(read.target) + " of chain " + std::to_string(read.chain) +
                                   ", not target " + std::to_string(identity_.target) + " of chain " +
                                   std::to_string(identity_.chain));
  salt_ = read.salt;
  return true;
}

void Core::write_identity() {
  IdentityFile written{.target = identity_.target, .chain = identity_.chain, .salt = salt_};
  written.crc = crc32c(0, &written, sizeof written - 4);
  const File file = disk_.open("identity-new", true);
  try {
    disk_.truncate(file, 0);
    disk_.write(file, 0, &written, sizeof written);
    disk_.sync(file);
  } catch (const Error&) {
    disk_.close(file);
    throw;
  }
  disk_.close(file);
  disk_.rename("identity-new", "identity");
  disk_.sync_names();
}

void Core::recover() {
  const std::vector<std::string> names = disk_.list();
  const std::vector<std::uint64_t> logs = numbers(names, "log-"), indexes = numbers(names, "index-");
  const bool identified = read_identity();
  bool damage_known = false;
  std::vector<std::uint64_t> needed;
  if (identified) {
    std::uint64_t first = 0, sequence = 1;
    bool found = false;
    for (auto number = indexes.rbegin(); number != indexes.rend() && !found; ++number) {
      found = read_snapshot(*number, sequence);
      if (found) first = *number;
      else damaged_ = true;
    }
    damage_known = damaged_;
    next_sequence_ = sequence;
    std::copy_if(logs.begin(), logs.end(), std::back_inserter(needed), [&](std::uint64_t n) { return n >= first; });
    read_logs(needed);
    if (next_sequence_ == sequence) damaged_ = true;  // not even the BEGIN of the first log
  } else {
    salt_ = std::uint64_t{std::random_device{}()} << 32 | std::random_device{}();
    // A store that was never finished has but logs that hold nothing; anything else is one whose identity is lost.
    for (const std::string& name : names) damaged_ = damaged_ || !(name.starts_with("log-") || name == "identity-new");
    damaged_ = damaged_ || logs.size() > 64;
  }
  claim_extents();
  salts_ = next_sequence_ << 32;
  begin_log(logs.empty() ? 0 : logs.back() + 1);
  if (!identified) write_identity();
  for (const std::uint64_t number : logs)
    if (std::find(needed.begin(), needed.end(), number) == needed.end()) disk_.remove(log_name(number));
  for (const std::uint64_t number : indexes)
    if (!identified) disk_.remove(index_name(number));
  punch_free(names);
  if (!damaged_ || damage_known) return;
  Record record;
  record.kind = RecordKind::damaged;
  record.version = 1;
  ride(record);
  sync();
  if (failed_ || !queue_.empty()) throw Error(Code::storage, "cannot write to the log of a chunk store that is being opened");
}

void Core::read_logs(const std::vector<std::uint64_t>& numbers) {
  for (const std::uint64_t number : numbers) read_log(number, number == numbers.back());
}

void Core::read_log(std::uint64_t number, bool last) {
  const File file = disk_.open(log_name(number), false);
  if (file == kNoFile) throw Error(Code::storage, log_name(number) + " is gone");
  try {
    std::vector<std::byte> bytes(static_cast<std::size_t>(disk_.size(file)));
    const std::size_t got = disk_.read(file, 0, bytes.data(), bytes.size());
    bytes.resize((got + kRecordStep - 1) / kRecordStep * kRecordStep);  // a power cut may end it within a record's padding
    LogWalk walk(bytes, {salt_, number}, next_sequence_);
    if (const auto first = walk.first_sequence(); first && *first < next_sequence_) {
      damaged_ = true;  // the log before went on after this one began
      walk = LogWalk(bytes, {salt_, number}, *first);
    }
    std::vector<Extent> freed;  // claim_extents finds what is free
    while (const auto record = walk.next()) {
      install(*record, freed);
      freed.clear();
    }
    damaged_ = damaged_ || walk.damaged();
    next_sequence_ = std::max(next_sequence_, walk.expected());
    log_bytes_ += walk.position();
    // A sync that failed before the crash may have left pages that look written: they are written once more.
    if (last && walk.position() > 0) disk_.write(file, 0, bytes.data(), static_cast<std::size_t>(walk.position()));
    disk_.sync(file);
  } catch (const Error&) {
    disk_.close(file);
    throw;
  }
  disk_.close(file);
}

// Marks what the entries name as taken. Two claims to one extent: neither has it.
void Core::claim_extents() {
  std::unordered_set<std::uint64_t> twice;
  const auto claim = [&](const IndexEntry& entry) {
    if (entry.extent().exists() && !space_.mark(entry.extent())) twice.insert(entry.extent().packed());
  };
  std::vector<IndexEntry> changed;
  std::vector<ChunkId> gone;
  for (const IndexEntry* at = index_.first(); at != nullptr; at = index_.after(at->chunk())) {
    claim(*at);
    if (at->version == 0 && !pending_.contains(at->chunk())) gone.push_back(at->chunk());
  }
  for (const auto& [chunk, pending] : pending_) {
    const IndexEntry* const committed = index_.find(chunk);
    if (committed == nullptr) put_entry({.inode = chunk.inode, .index = chunk.index});
    if (committed == nullptr || committed->extent() != pending.entry.extent()) claim(pending.entry);
  }
  for (const ChunkId& chunk : gone) erase_entry(chunk);
  if (twice.empty()) return;
  damaged_ = true;
  const auto lose = [&](IndexEntry& entry) {
    if (!entry.extent().exists() || !twice.contains(entry.extent().packed())) return false;
    entry.set_extent({});
    entry.flags |= IndexEntry::kLost;
    return true;
  };
  for (const IndexEntry* at = index_.first(); at != nullptr; at = index_.after(at->chunk())) {
    IndexEntry entry = *at;
    if (lose(entry)) changed.push_back(entry);
  }
  for (const IndexEntry& entry : changed) put_entry(entry);
  for (auto& [chunk, pending] : pending_) lose(pending.entry);
  for (const std::uint64_t packed : twice) space_.free(Extent::unpack(packed));
}

// Gives back what free extents hold: bytes whose record did not become durable, or whose hole was not punched.
void Core::punch_free(const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    if (!name.starts_with("data-") || name.size() < 8) continue;
    Extent extent;
    extent.size_class = static_cast<std::uint8_t>(name[5] - '0');
    const char* const end = name.data() + name.size();
    if (!extent.exists() || std::from_chars(name.data() + 7, end, extent.file).ptr != end) continue;
    const File file = file_of(extent);
    const auto slots = static_cast<std::uint32_t>((disk_.size(file) + extent.stride() - 1) / extent.stride());
    space_.free_runs(extent.size_class, extent.file, slots, [&](std::uint32_t first, std::uint32_t count) {
      disk_.punch(file, first * extent.stride(), count * extent.stride());
    });
  }
}

// A new file with its BEGIN, durable with all names before it; then it is the log. If it fails, the log before goes on and the new one is gone.
void Core::begin_log(std::uint64_t number) {
  Record begin;
  begin.sequence = next_sequence_;
  std::vector<std::byte> bytes;
  encode(begin, {salt_, number}, 0, bytes);
  File file = kNoFile;
  try {
    file = disk_.open(log_name(number), true);
    disk_.truncate(file, 0);
    disk_.write(file, 0, bytes.data(), bytes.size());
    disk_.sync(file);
    disk_.sync_names();
  } catch (const Error&) {
    try {
      if (file != kNoFile) disk_.close(file);
      disk_.remove(log_name(number));
      disk_.sync_names();
    } catch (const Error&) {
      failed_ = true;
    }
    throw;
  }
  if (log_ != kNoFile) disk_.close(log_);
  log_ = file;
  log_number_ = number;
  log_size_ = bytes.size();
  log_bytes_ += bytes.size();
  ++next_sequence_;
}

}  // namespace ff::fs3::store
