// Writing and reading snapshots of the index. A snapshot is a little-endian file of blocks. Each block has items of one
// kind and a CRC; the last block has the kind Items::end.
#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>

#include "base/crc/crc32c.hpp"
#include "base/error.hpp"
#include "fs3/store/core.hpp"

namespace ff::fs3::store {
namespace {

constexpr std::size_t kBlockBytes = 64 << 10;

struct BlockHeader {
  std::uint32_t crc;  // CRC32C of the rest of the header and of the items, continued from start()
  Items items;
  std::uint32_t count, zero;
};
static_assert(sizeof(BlockHeader) == 16);

struct Head {
  std::uint64_t sequence;  // sequence number of the BEGIN of the log that follows the snapshot
  std::uint64_t floor;
  std::uint64_t words[4];
  std::uint64_t damaged;
};

struct PendingItem {
  IndexEntry entry;
  std::uint64_t removes;
};

struct TagItem {
  std::uint64_t client, seq, inode, version;
  std::uint32_t channel, index, length, zero;
};

// Returns the CRC32C of a block's place, so that a block written to a wrong place does not verify.
std::uint32_t start(std::uint64_t salt, std::uint64_t number, std::uint64_t block) {
  const std::uint64_t where[4] = {salt, number, block, 0x78656469};
  return crc32c(0, where, sizeof where);
}

template <class Item>
constexpr std::size_t per_block() {
  return (kBlockBytes - sizeof(BlockHeader)) / sizeof(Item);
}

class BlockWriter {
 public:
  BlockWriter(Disk& disk, std::array<File, 2> files, std::uint64_t salt, std::uint64_t number)
      : disk_(disk), files_(files), salt_(salt), number_(number), bytes_(kBlockBytes) {}
  template <class Item>
  void put(Items items, std::span<const Item> all) {
    for (std::size_t at = 0; at < all.size(); at += per_block<Item>())
      block(items, all.data() + at, std::min(per_block<Item>(), all.size() - at), sizeof(Item));
  }
  void end() { block(Items::end, nullptr, 0, 0); }

 private:
  void block(Items items, const void* from, std::size_t count, std::size_t size) {
    BlockHeader header{0, items, static_cast<std::uint32_t>(count), 0};
    std::memcpy(bytes_.data(), &header, sizeof header);
    if (count > 0) std::memcpy(bytes_.data() + sizeof header, from, count * size);
    const std::size_t used = sizeof header + count * size;
    header.crc = crc32c(start(salt_, number_, blocks_), bytes_.data() + 4, used - 4);
    std::memcpy(bytes_.data(), &header.crc, 4);
    for (const File file : files_) disk_.write(file, blocks_ * kBlockBytes, bytes_.data(), used);
    ++blocks_;
  }
  Disk& disk_;
  std::array<File, 2> files_;  // the index and its copy
  std::uint64_t salt_, number_, blocks_ = 0;
  std::vector<std::byte> bytes_;
};

std::size_t item_size(Items items) {
  switch (items) {
    case Items::head: return sizeof(Head);
    case Items::entries: return sizeof(IndexEntry);
    case Items::pending: return sizeof(PendingItem);
    case Items::tags: return sizeof(TagItem);
    case Items::end: return 0;
  }
  return ~std::size_t{0};
}

// Returns the items of a block, or nullptr if it does not verify.
const std::byte* verify(const std::vector<std::byte>& bytes, std::size_t size, std::uint32_t begin,
                        BlockHeader& header) {
  if (size < sizeof header) return nullptr;
  std::memcpy(&header, bytes.data(), sizeof header);
  const std::size_t item = item_size(header.items);
  if (item > kBlockBytes || header.count > kBlockBytes) return nullptr;
  const std::size_t used = sizeof header + item * header.count;
  if (used > size || crc32c(begin, bytes.data() + 4, used - 4) != header.crc) return nullptr;
  return bytes.data() + sizeof header;
}

template <class Item, class Use>
void each(const std::byte* from, std::uint32_t count, const Use& use) {
  for (std::uint32_t i = 0; i < count; ++i) {
    Item item;
    std::memcpy(&item, from + i * sizeof item, sizeof item);
    use(item);
  }
}

}  // namespace

std::string Core::log_name(std::uint64_t number) {
  const std::string digits = std::to_string(number);
  return "log-" + std::string(12 - std::min<std::size_t>(12, digits.size()), '0') + digits;
}

std::string Core::index_name(std::uint64_t number) { return "index-" + log_name(number).substr(4); }

Status Core::snapshot() {
  const std::lock_guard one(snapshot_mutex_);
  if (failed_) return Status::io_error;
  renew_ = false;  // tried only once: on a full disk each try would leave a log
  std::uint64_t number = 0, sequence = 0, older_bytes = 0;
  try {
    const std::lock_guard lock(sync_mutex_);
    begin_log(log_number_ + 1);
    number = log_number_;
    sequence = next_sequence_ - 1;
    older_bytes = log_bytes_;
  } catch (const Error& error) {
    return error.code() == Code::no_space ? Status::no_space : Status::io_error;
  }
  try {
    write_snapshot(number, sequence);
  } catch (const Error& error) {
    try {
      remove_both("index-new");
    } catch (const Error&) {  // the next snapshot overwrites it
    }
    return error.code() == Code::no_space ? Status::no_space : Status::io_error;
  }
  log_bytes_ -= older_bytes;
  try {
    delete_older(number);
  } catch (const Error&) {  // the next snapshot or open tries again
  }
  return Status::ok;
}

// Writes the index in batches of entries. Each entry is written in its current state, which is not older than the
// beginning of the log `number`.
void Core::write_snapshot(std::uint64_t number, std::uint64_t sequence) {
  {
    const Opened file(disk_, "index-new", true), copy(disk_, copy_name("index-new"), true);
    disk_.truncate(file, 0);
    disk_.truncate(copy, 0);
    BlockWriter out(disk_, {file, copy}, salt_, number);
    std::vector<TagItem> tags;
    std::vector<PendingItem> pending;
    Head head{sequence, 0, {}, 0};
    {
      const std::shared_lock lock(mutex_);
      head.floor = floor_;
      std::copy(words_.begin(), words_.end(), head.words);
      head.damaged = damaged_ ? 1 : 0;
      for (const auto& [key, t] : tags_)
        tags.push_back({t.tag.client, t.tag.seq, t.chunk.inode, t.version, t.tag.channel, t.chunk.index, t.length, 0});
    }
    out.put(Items::head, std::span<const Head>(&head, 1));
    out.put(Items::tags, std::span<const TagItem>(tags));
    std::optional<ChunkId> after;
    std::vector<IndexEntry> entries;
    do {
      entries.clear();
      pending.clear();
      {
        const std::shared_lock lock(mutex_);
        const IndexEntry* at = after ? index_.after(*after) : index_.first();
        for (; at != nullptr && entries.size() < per_block<IndexEntry>(); at = index_.after(at->chunk())) {
          entries.push_back(*at);
          const auto found = pending_.empty() ? pending_.end() : pending_.find(at->chunk());
          if (found != pending_.end()) pending.push_back({found->second.entry, found->second.removes ? 1u : 0u});
        }
      }
      out.put(Items::entries, std::span<const IndexEntry>(entries));
      out.put(Items::pending, std::span<const PendingItem>(pending));
      if (!entries.empty()) after = entries.back().chunk();
    } while (!entries.empty());
    out.end();
    disk_.sync(file);
    disk_.sync(copy);
  }
  disk_.rename(copy_name("index-new"), copy_name(index_name(number)));
  disk_.rename("index-new", index_name(number));
  write_identity();  // a misdirected write may have damaged the identity; this call also syncs the names
}

// Deletes the files that the snapshot `number` and the logs from `number` on make obsolete.
void Core::delete_older(std::uint64_t number) {
  for (const std::string& name : disk_.list()) {
    std::string_view its = name;
    if (its.starts_with(kCopyPrefix)) its.remove_prefix(kCopyPrefix.size());
    if ((its.starts_with("log-") && its < log_name(number)) || (its.starts_with("index-") && its != index_name(number)))
      disk_.remove(name);
  }
}

// Returns false if the head is missing. Takes a block that does not verify from the copy; skips a block that verifies
// in neither and sets damaged_.
bool Core::read_snapshot(std::uint64_t number, std::uint64_t& sequence) {
  const Opened file(disk_, index_name(number), false), copy(disk_, copy_name(index_name(number)), false);
  std::vector<std::byte> bytes(kBlockBytes);
  BlockHeader header{};
  bool there = true;  // whether the index or its copy has any bytes of the block
  const auto read_block = [&](std::uint64_t block) -> const std::byte* {
    there = false;
    for (const Opened* one : {&file, &copy}) {
      if (!one->exists()) continue;
      const std::size_t size = disk_.read(*one, block * kBlockBytes, bytes.data(), kBlockBytes);
      there = there || size != 0;
      if (const std::byte* const items = verify(bytes, size, start(salt_, number, block), header)) {
        if (one == &copy) ++mended_;
        return items;
      }
    }
    return nullptr;
  };
  bool ended = false, headed = false;
  for (std::uint64_t block = 0; !ended; ++block) {
    const std::byte* const items = read_block(block);
    if (block == 0 && (items == nullptr || header.items != Items::head)) return false;
    if (!there) break;
    if (items == nullptr) {
      damaged_ = true;
      continue;
    }
    headed = true;
    ended = header.items == Items::end;
    read_items(header.items, items, header.count, sequence);
  }
  if (!ended) damaged_ = true;
  return headed;
}

void Core::read_items(Items items, const std::byte* from, std::uint32_t count, std::uint64_t& sequence) {
  switch (items) {
    case Items::head:
      each<Head>(from, count, [&](const Head& head) {
        sequence = head.sequence;
        floor_ = head.floor;
        std::copy_n(head.words, words_.size(), words_.begin());
        damaged_ = damaged_ || head.damaged != 0;
      });
      break;
    case Items::entries: each<IndexEntry>(from, count, [&](const IndexEntry& entry) { put_entry(entry); }); break;
    case Items::pending:
      each<PendingItem>(from, count, [&](const PendingItem& item) {
        pending_[item.entry.chunk()] = {item.entry, item.removes != 0};
      });
      break;
    case Items::tags:
      each<TagItem>(from, count, [&](const TagItem& t) {
        keep_tag({{t.client, t.channel, t.seq}, {t.inode, t.index}, t.version, t.length});
      });
      break;
    case Items::end: break;
  }
}

}  // namespace ff::fs3::store
