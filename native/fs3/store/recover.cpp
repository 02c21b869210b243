// Opening of a store: reads the identity, the newest snapshot and the logs after it, then begins a new log.
// docs/internals/fs3-store.md describes it under "End or damage".
#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <random>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/crc/crc32c.hpp"
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
  std::uint32_t crc = 0;  // CRC32C of all fields before this one
};
static_assert(sizeof(IdentityFile) == 40);

class ClosedAtEnd {  // closes a file at the end of the scope
 public:
  ClosedAtEnd(Disk& disk, File file) : disk_(disk), file_(file) {}
  ~ClosedAtEnd() { disk_.close(file_); }
  ClosedAtEnd(const ClosedAtEnd&) = delete;
  ClosedAtEnd& operator=(const ClosedAtEnd&) = delete;

 private:
  Disk& disk_;
  const File file_;
};

// Returns the numbers of the files whose names begin with `prefix`, and of their copies, ascending.
std::vector<std::uint64_t> numbers(const std::vector<std::string>& names, std::string_view prefix) {
  std::vector<std::uint64_t> found;
  for (std::string_view name : names) {
    if (name.starts_with(kCopyPrefix)) name.remove_prefix(kCopyPrefix.size());
    std::uint64_t number = 0;
    const char* const end = name.data() + name.size();
    if (name.starts_with(prefix) && std::from_chars(name.data() + prefix.size(), end, number).ptr == end)
      found.push_back(number);
  }
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

}  // namespace

// Returns false if the file of that name is missing or does not verify. Throws Error(invalid) for another store's file.
bool Core::read_identity(const std::string& name) {
  const File file = disk_.open(name, false);
  if (file == kNoFile) return false;
  const ClosedAtEnd closed(disk_, file);
  IdentityFile read;
  const std::size_t got = disk_.read(file, 0, &read, sizeof read);
  if (got < sizeof read || read.magic != IdentityFile{}.magic || crc32c(0, &read, sizeof read - 4) != read.crc)
    return false;
  if (read.format != kFormat || read.block != kBlock)
    throw Error(Code::invalid,
                "this chunk store has format " + std::to_string(read.format) + ", expected " + std::to_string(kFormat));
  if (Identity{read.target, read.chain} != identity_)
    throw Error(Code::invalid, "the chunk store belongs to target " + std::to_string(read.target) + " of chain " +
                                   std::to_string(read.chain) + ", not target " + std::to_string(identity_.target) +
                                   " of chain " + std::to_string(identity_.chain));
  salt_ = read.salt;
  return true;
}

void Core::write_identity() {
  write_identity(copy_name("identity"));
  write_identity("identity");
}

void Core::write_identity(const std::string& name) {
  IdentityFile written{.target = identity_.target, .chain = identity_.chain, .salt = salt_};
  written.crc = crc32c(0, &written, sizeof written - 4);
  {
    const File file = disk_.open("identity-new", true);
    const ClosedAtEnd closed(disk_, file);
    disk_.truncate(file, 0);
    disk_.write(file, 0, &written, sizeof written);
    disk_.sync(file);
  }
  disk_.rename("identity-new", name);
  disk_.sync_names();
}

void Core::recover() {
  const std::vector<std::string> names = disk_.list();
  const std::vector<std::uint64_t> logs = numbers(names, "log-"), indexes = numbers(names, "index-");
  const bool original = read_identity("identity"), copied = read_identity(copy_name("identity"));
  const bool identified = original || copied;
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
    if (next_sequence_ == sequence) damaged_ = true;  // not even the first log's BEGIN is readable
  } else {
    salt_ = std::uint64_t{std::random_device{}()} << 32 | std::random_device{}();
    // A store whose creation never finished has only empty logs; any other store has lost its identity.
    const auto holds_nothing = [](const std::string& name) {
      return name.starts_with("log-") || name.starts_with(copy_name("log-")) || name == "identity-new";
    };
    damaged_ = !std::all_of(names.begin(), names.end(), holds_nothing);
    damaged_ = damaged_ || logs.size() > 64;
  }
  claim_extents();
  salts_ = next_sequence_ << 32;
  begin_log(logs.empty() ? 0 : logs.back() + 1);
  if (copied && !original) ++mended_;
  if (!original || !copied) write_identity();
  for (const std::uint64_t number : logs)
    if (std::find(needed.begin(), needed.end(), number) == needed.end()) remove_both(log_name(number));
  for (const std::uint64_t number : indexes)
    if (!identified) remove_both(index_name(number));
  punch_free(names);
  renew_ = mended_ > 0;
  if (!damaged_ || damage_known) return;
  Record record;
  record.kind = RecordKind::damaged;
  record.version = 1;
  ride(record);
  sync();
  if (failed_ || !queue_.empty())
    throw Error(Code::storage, "cannot write to the log of a chunk store that is being opened");
}

void Core::read_logs(const std::vector<std::uint64_t>& numbers) {
  for (const std::uint64_t number : numbers) read_log(number, number == numbers.back());
}

void Core::read_log(std::uint64_t number, bool last) {
  std::vector<std::byte> copy;
  try {
    if (const Opened file(disk_, copy_name(log_name(number)), false); file.exists()) copy = read_whole(file);
  } catch (const Error&) {  // as if there were no copy
  }
  // A copy without a BEGIN may belong to a removed log whose name came back at a power cut.
  const bool begins = LogWalk({}, copy, {salt_, number}, 0).first_sequence().has_value();
  const Opened file(disk_, log_name(number), begins);
  if (!file.exists()) return;
  std::vector<std::byte> bytes = read_whole(file);
  // After a power cut the log or its copy may end within a record's padding.
  bytes.resize((std::max(bytes.size(), copy.size()) + kRecordStep - 1) / kRecordStep * kRecordStep);
  copy.resize(copy.empty() ? 0 : bytes.size());
  LogWalk walk(bytes, copy, {salt_, number}, next_sequence_);
  if (const auto first = walk.first_sequence(); first && *first < next_sequence_) {
    damaged_ = true;  // the previous log continued after this one began
    walk = LogWalk(bytes, copy, {salt_, number}, *first);
  }
  std::vector<Extent> freed;  // not used: claim_extents finds the free extents
  while (const auto record = walk.next()) {
    install(*record, freed);
    freed.clear();
  }
  damaged_ = damaged_ || walk.damaged();
  mended_ += walk.mended();
  next_sequence_ = std::max(next_sequence_, walk.expected());
  log_bytes_ += walk.position();
  // After a sync that failed before the crash, the page cache may hold bytes that the disk lacks: write them once more.
  if ((last || walk.mended() > 0) && walk.position() > 0)
    disk_.write(file, 0, bytes.data(), static_cast<std::size_t>(walk.position()));
  disk_.sync(file);
  bytes.resize(static_cast<std::size_t>(walk.position()));
  if (!std::equal(bytes.begin(), bytes.end(), copy.begin(),
                  copy.begin() + static_cast<std::ptrdiff_t>(std::min(bytes.size(), copy.size()))))
    renew_copy(copy_name(log_name(number)), bytes);
}

// Writes the copy of a log again, because a power cut may have removed the unsynced end of the copy.
void Core::renew_copy(const std::string& name, std::span<const std::byte> bytes) {
  try {
    const Opened file(disk_, name, true);
    disk_.write(file, 0, bytes.data(), bytes.size());
    disk_.sync(file);
  } catch (const Error&) {  // the next open does it
  }
}

std::vector<std::byte> Core::read_whole(File file) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(disk_.size(file)));
  bytes.resize(disk_.read(file, 0, bytes.data(), bytes.size()));
  return bytes;
}

void Core::remove_both(const std::string& name) {
  disk_.remove(copy_name(name));
  disk_.remove(name);
}

// Returns whether the bytes of the entry's extent are those of its version.
bool Core::verifies(const IndexEntry& entry) {
  try {
    const auto blocks = static_cast<std::uint32_t>((entry.length + kBlock - 1) / kBlock);
    const std::vector<std::uint32_t> crcs = read_crcs(entry, 0, blocks);
    std::array<std::byte, kBlock> bytes;
    std::uint32_t whole = 0;
    for (std::uint32_t block = 0; block < blocks; ++block) {
      const std::size_t size = std::min<std::size_t>(kBlock, entry.length - block * kBlock);
      read_bytes(entry.extent(), block * kBlock, bytes.data(), size);
      if (crc32c(0, bytes.data(), size) != crcs[block]) return false;
      whole = crc32c_combine(whole, crcs[block], size);
    }
    return whole == entry.crc;
  } catch (const Error&) {
    return false;
  }
}

// Marks the entries' extents as taken. If two entries claim one extent, because a record between them is lost, the
// extent goes to the entry whose bytes it holds. If it holds the bytes of both or of neither, neither entry gets it.
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
  std::unordered_map<std::uint64_t, unsigned> right;  // how many claims of an extent verify
  std::unordered_set<const IndexEntry*> verified;
  const auto contested = [&](const IndexEntry& entry) {
    return entry.extent().exists() && twice.contains(entry.extent().packed());
  };
  const auto judge = [&](const IndexEntry& entry) {
    if (!contested(entry) || !verifies(entry)) return;
    ++right[entry.extent().packed()];
    verified.insert(&entry);
  };
  for (const IndexEntry* at = index_.first(); at != nullptr; at = index_.after(at->chunk())) judge(*at);
  for (const auto& [chunk, pending] : pending_) judge(pending.entry);
  const auto loses = [&](const IndexEntry& entry) {
    return contested(entry) && !(right[entry.extent().packed()] == 1 && verified.contains(&entry));
  };
  const auto take = [](IndexEntry& entry) {
    entry.set_extent({});
    entry.flags |= IndexEntry::kLost;
  };
  for (const IndexEntry* at = index_.first(); at != nullptr; at = index_.after(at->chunk()))
    if (loses(*at)) take(changed.emplace_back(*at));
  for (const IndexEntry& entry : changed) put_entry(entry);
  for (auto& [chunk, pending] : pending_)
    if (loses(pending.entry)) take(pending.entry);
  for (const std::uint64_t packed : twice)
    if (right[packed] != 1) space_.free(Extent::unpack(packed));
}

// Frees the disk space of free extents. Before the crash, an Apply whose record did not become durable may have written
// there, or the extent may have been freed without a hole punched.
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

// Creates a new log whose first record is a BEGIN. Makes this log and all earlier changes of file names durable, then
// makes it the current log. On failure the previous log stays in use and the new one is removed.
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
  begin_log_copy(number, bytes);
  log_number_ = number;
  log_size_ = bytes.size();
  log_bytes_ += bytes.size();
  ++next_sequence_;
}

// Begins the log's copy if the disk allows it. A missing copy is no error: the copy has no other data than the log.
void Core::begin_log_copy(std::uint64_t number, std::span<const std::byte> bytes) {
  try {
    if (log_copy_ != kNoFile) disk_.sync(log_copy_);
  } catch (const Error&) {  // the unsynced part of the copy may never be needed
  }
  if (log_copy_ != kNoFile) disk_.close(std::exchange(log_copy_, kNoFile));
  try {
    disk_.remove(copy_name(log_name(number)));
    log_copy_ = disk_.open(copy_name(log_name(number)), true);
  } catch (const Error&) {
  }
  copy_log(0, bytes);
}

// Copies bytes of the log. REQUIRES: the log's bytes at `position` are durable.
void Core::copy_log(std::uint64_t position, std::span<const std::byte> bytes) {
  if (log_copy_ == kNoFile) return;
  try {
    disk_.write(log_copy_, position, bytes.data(), bytes.size());
  } catch (const Error&) {
  }
}

}  // namespace ff::fs3::store
