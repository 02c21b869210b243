#include "kv/table.hpp"

#include <algorithm>
#include <cstring>

#include "base/crc/crc32c.hpp"

namespace ff::kv {

namespace {

constexpr std::size_t kBlock = 16 << 10;
constexpr char kMagic[] = "FFKVTBL1";

template <typename T>
T load(const char* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// Returns the bytes behind the checksum. Throws Error(corrupted).
std::string_view checked(std::string_view bytes, const char* what) {
  if (bytes.size() < 8) throw Error(Code::corrupted, std::string(what) + " is too short");
  const std::string_view rest = bytes.substr(4);
  if (crc32c(0, rest.data(), rest.size()) != load<std::uint32_t>(bytes.data()))
    throw Error(Code::corrupted, "the CRC32C of " + std::string(what) + " does not match");
  return rest;
}

std::string trailer_of(std::uint64_t index_offset, std::uint64_t index_bytes) {
  std::string trailer(kMagic, 8);
  append(trailer, index_offset);
  append(trailer, index_bytes);
  append(trailer, crc32c(0, trailer.data(), trailer.size()));
  return trailer;
}

}  // namespace

Block::Block(std::string bytes) : bytes_(std::move(bytes)) {
  const std::string_view rest = checked(bytes_, "a block");
  count_ = load<std::uint32_t>(bytes_.data() + bytes_.size() - 4);
  if (count_ == 0 || count_ > (rest.size() - 4) / 4) throw Error(Code::corrupted, "a block counts its records wrong");
  offsets_ = bytes_.size() - 4 - 4 * count_;
  Parser parser(std::string_view(bytes_).substr(4, offsets_ - 4));
  std::size_t at = 0;
  for (std::uint64_t place = 4; !parser.empty(); ++at) {
    if (at == count_ || offset(at) != place) throw Error(Code::corrupted, "a block places its records wrong");
    const Record record = parser.record(true);
    place += 25 + record.key.size() + record.value.size();
  }
  if (at != count_) throw Error(Code::corrupted, "a block counts its records wrong");
}

std::uint32_t Block::offset(std::size_t at) const { return load<std::uint32_t>(bytes_.data() + offsets_ + 4 * at); }

Record Block::record(std::size_t at) const {
  return Parser(std::string_view(bytes_).substr(offset(at), offsets_ - offset(at))).record(true);
}

std::size_t Block::lower_bound(std::string_view key) const {
  std::size_t low = 0, high = count_;
  while (low < high) {
    const std::size_t middle = (low + high) / 2;
    const char* const at = bytes_.data() + offset(middle);
    if (std::string_view(at + 25, load<std::uint32_t>(at + 1)) < key) low = middle + 1;
    else high = middle;
  }
  return low;
}

void BlockCache::added(const std::shared_ptr<Table>& table, std::size_t block, std::size_t bytes) {
  turn_.push_back({table, block, bytes});
  bytes_ += bytes;
  // Visits each block at most twice: a first visit clears `used`, a second visit evicts. The newest block stays.
  for (std::size_t turns = 2 * turn_.size(); bytes_ > capacity_ && turn_.size() > 1 && turns > 0; --turns) {
    Place place = std::move(turn_.front());
    turn_.pop_front();
    const std::shared_ptr<Table> owner = place.table.lock();
    if (owner && !owner->evict(place.block)) turn_.push_back(std::move(place));
    else bytes_ -= place.bytes;
  }
}

Table::Table(std::string name, std::string first, std::string last, std::uint64_t index_offset,
             std::uint64_t index_bytes, std::shared_ptr<BlockCache> cache)
    : name_(std::move(name)),
      first_(std::move(first)),
      last_(std::move(last)),
      index_offset_(index_offset),
      index_bytes_(index_bytes),
      cache_(std::move(cache)) {}

std::pair<std::uint64_t, std::uint64_t> Table::range(std::int64_t block, std::uint64_t most) const {
  if (block < 0) return {index_offset_, index_bytes_ + kTrailer};
  std::size_t at = static_cast<std::size_t>(block);
  if (at >= blocks_.size()) throw Error(Code::invalid, "table " + name_ + " has no block " + std::to_string(block));
  const std::uint64_t begin = blocks_[at].offset;
  std::uint64_t end = begin + blocks_[at].bytes;
  while (++at < blocks_.size() && !blocks_[at].block && end + blocks_[at].bytes - begin <= most)
    end += blocks_[at].bytes;
  return {begin, end - begin};
}

void Table::supply(std::uint64_t offset, std::string_view bytes) {
  if (offset == index_offset_) {
    if (bytes.size() != index_bytes_ + kTrailer)
      throw Error(Code::corrupted, "table " + name_ + " ends inside its index");
    if (bytes.substr(index_bytes_) != trailer_of(index_offset_, index_bytes_))
      throw Error(Code::corrupted, "the trailer of table " + name_ + " does not match");
    if (!indexed()) take_index(bytes.substr(0, index_bytes_));
    return;
  }
  const auto place = std::lower_bound(blocks_.begin(), blocks_.end(), offset,
                                      [](const Place& its, std::uint64_t wanted) { return its.offset < wanted; });
  for (std::size_t at = place - blocks_.begin(); at < blocks_.size() && !bytes.empty(); ++at) {
    Place& its = blocks_[at];
    if (its.offset != offset || its.bytes > bytes.size())
      throw Error(Code::corrupted, "table " + name_ + " ends inside a block");
    if (!its.block) {
      its.block = std::make_shared<const Block>(std::string(bytes.substr(0, its.bytes)));
      its.used = true;
      cache_->added(shared_from_this(), at, its.bytes);
    }
    offset += its.bytes;
    bytes.remove_prefix(its.bytes);
  }
}

void Table::take_index(std::string_view bytes) {
  Parser parser(checked(bytes, "an index"));
  std::vector<Place> blocks(parser.number<std::uint32_t>() <= bytes.size() / 16 ? load<std::uint32_t>(bytes.data() + 4)
                                                                                : 0);
  std::uint64_t next = 0;
  for (Place& place : blocks) {
    place.offset = parser.number<std::uint64_t>();
    place.bytes = parser.number<std::uint32_t>();
    place.used = false;
    place.last = parser.slice(parser.number<std::uint32_t>());
    if (place.offset != next) throw Error(Code::corrupted, "an index places its blocks wrong");
    next += place.bytes;
  }
  if (blocks.empty() || !parser.empty() || next != index_offset_)
    throw Error(Code::corrupted, "an index counts its blocks wrong");
  blocks_ = std::move(blocks);
}

std::size_t Table::block_of(std::string_view key) const {
  const auto place = std::lower_bound(blocks_.begin(), blocks_.end(), key,
                                      [](const Place& its, std::string_view wanted) { return its.last < wanted; });
  return place - blocks_.begin();
}

std::shared_ptr<const Block> Table::block(std::size_t at) {
  blocks_[at].used = true;
  return blocks_[at].block;
}

bool Table::evict(std::size_t at) {
  if (blocks_[at].used) {
    blocks_[at].used = false;
    return false;
  }
  blocks_[at].block.reset();
  return true;
}

void TableBuilder::add(const Record& record) {
  if (records_ == 0) first_ = record.key;
  last_ = record.key;
  if (block_.empty()) block_.assign(4, '\0');
  offsets_.push_back(static_cast<std::uint32_t>(block_.size()));
  append(block_, static_cast<std::uint8_t>(record.kind));
  append(block_, static_cast<std::uint32_t>(record.key.size()));
  append(block_, static_cast<std::uint32_t>(record.value.size()));
  append(block_, record.expires);
  append(block_, record.sequence);
  block_ += record.key;
  block_ += record.value;
  ++records_;
  if (block_.size() >= kBlock) end_block();
}

void TableBuilder::end_block() {
  for (const std::uint32_t offset : offsets_) append(block_, offset);
  append(block_, static_cast<std::uint32_t>(offsets_.size()));
  const std::uint32_t crc = crc32c(0, block_.data() + 4, block_.size() - 4);
  std::memcpy(block_.data(), &crc, sizeof crc);
  append(index_, static_cast<std::uint64_t>(file_.size()));
  append(index_, static_cast<std::uint32_t>(block_.size()));
  append(index_, static_cast<std::uint32_t>(last_.size()));
  index_ += last_;
  file_ += block_;
  block_.clear();
  offsets_.clear();
  ++blocks_;
}

std::optional<TableBuilder::Whole> TableBuilder::finish() {
  if (records_ == 0) return std::nullopt;
  if (!offsets_.empty()) end_block();
  std::string index;
  append(index, std::uint32_t{0});
  append(index, blocks_);
  index += index_;
  const std::uint32_t crc = crc32c(0, index.data() + 4, index.size() - 4);
  std::memcpy(index.data(), &crc, sizeof crc);
  Whole whole{std::move(file_), std::move(first_), std::move(last_), 0, index.size(), records_};
  whole.index_offset = whole.bytes.size();
  whole.bytes += index;
  whole.bytes += trailer_of(whole.index_offset, whole.index_bytes);
  *this = TableBuilder();
  return whole;
}

}  // namespace ff::kv
