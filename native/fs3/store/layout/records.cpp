#include "fs3/store/layout/records.hpp"

#include <algorithm>
#include <cstring>

#include "base/crc/crc32c.hpp"

namespace ff::fs3::store {
namespace {

struct Header {
  std::uint32_t crc;
  std::uint16_t length;  // bytes of header and body
  std::uint8_t kind, flags;
  std::uint64_t sequence;
  std::uint32_t place, zero;
};
static_assert(sizeof(Header) == 24);

class Writer {
 public:
  explicit Writer(std::vector<std::byte>& out) : out_(out) {}
  template <class T>
  void put(T value) {
    const std::size_t at = out_.size();
    out_.resize(at + sizeof value);
    std::memcpy(out_.data() + at, &value, sizeof value);
  }
  void put(ChunkId chunk) {
    put(chunk.inode);
    put(chunk.index);
    put(std::uint32_t{0});  // reserved
  }
  void put(const Tag& tag) {
    put(tag.client);
    put(tag.seq);
    put(tag.channel);
  }

 private:
  std::vector<std::byte>& out_;
};

class Reader {
 public:
  explicit Reader(const std::byte* from) : from_(from) {}
  template <class T>
  void get(T& value) {
    std::memcpy(&value, from_, sizeof value);
    from_ += sizeof value;
  }
  void get(ChunkId& chunk) {
    std::uint32_t zero;
    get(chunk.inode);
    get(chunk.index);
    get(zero);
  }
  void get(Tag& tag) {
    get(tag.client);
    get(tag.seq);
    get(tag.channel);
  }

 private:
  const std::byte* from_;
};

// Fields of a body in their order, for a Writer or a Reader.
template <class Fields>
void body(RecordKind kind, const Fields& field, auto& record) {
  switch (kind) {
    case RecordKind::begin: break;
    case RecordKind::apply:
      field(record.chunk), field(record.version), field(record.chain_version), field(record.length);
      field(record.crc), field(record.last_crc), field(record.extent.file), field(record.extent.slot);
      field(record.extent.size_class), field(record.extent_flags), field(record.salt), field(record.tag);
      break;
    case RecordKind::commit:
    case RecordKind::drop: field(record.chunk), field(record.version); break;
    case RecordKind::floor:
    case RecordKind::damaged: field(record.version); break;
    case RecordKind::tag: field(record.tag), field(record.chunk), field(record.version), field(record.length); break;
    case RecordKind::forget: field(record.tag.client); break;
    case RecordKind::state:
      for (auto& word : record.words) field(word);
      break;
  }
}

}  // namespace

std::uint32_t LogPlace::start(std::uint64_t position) const {
  const std::uint64_t where[3] = {salt, number, position};
  return crc32c(0, where, sizeof where);
}

void encode(const Record& record, const LogPlace& log, std::uint64_t position, std::vector<std::byte>& out) {
  const std::size_t begin = out.size();
  out.resize(begin + sizeof(Header));
  Writer writer(out);
  body(record.kind, [&](const auto& value) { writer.put(value); }, record);
  Header header{0,
                static_cast<std::uint16_t>(out.size() - begin),
                static_cast<std::uint8_t>(record.kind),
                record.flags,
                record.sequence,
                record.place,
                0};
  std::memcpy(out.data() + begin, &header, sizeof header);
  header.crc = crc32c(log.start(position + begin), out.data() + begin + 4, out.size() - begin - 4);
  std::memcpy(out.data() + begin, &header.crc, 4);
  out.resize((out.size() + kRecordStep - 1) / kRecordStep * kRecordStep);
}

std::optional<Record> LogWalk::at(std::uint64_t position, std::uint64_t* end) const {
  const std::optional<Record> record = at(bytes_, position, end);
  return record ? record : at(copy_, position, end);
}

std::optional<Record> LogWalk::at(std::span<const std::byte> bytes, std::uint64_t position, std::uint64_t* end) const {
  Header header;
  if (position + sizeof header > bytes.size()) return std::nullopt;
  const std::byte* const from = bytes.data() + position;
  std::memcpy(&header, from, sizeof header);
  if (header.length < sizeof header || position + header.length > bytes.size()) return std::nullopt;
  if (crc32c(log_.start(position), from + 4, header.length - std::size_t{4}) != header.crc) return std::nullopt;
  Record record;
  record.kind = static_cast<RecordKind>(header.kind);
  record.flags = header.flags;
  record.sequence = header.sequence;
  record.place = header.place;
  Reader reader(from + sizeof header);
  body(record.kind, [&](auto& value) { reader.get(value); }, record);
  *end = position + (header.length + kRecordStep - 1) / kRecordStep * kRecordStep;
  return record;
}

std::optional<std::uint64_t> LogWalk::first_sequence() const {
  std::uint64_t end = 0;
  const std::optional<Record> record = at(0, &end);
  return record ? std::optional(record->sequence) : std::nullopt;
}

std::optional<Record> LogWalk::next() {
  std::uint64_t begin = position_, end = 0;
  std::optional<Record> record = at(begin, &end);
  if (!record || record->sequence != expected_) {
    // The expected record is not here. If a later batch began after that record was durable, the record is damaged. If
    // there is no such batch, the log ends here.
    std::optional<Record> first;
    std::uint64_t first_begin = 0, first_end = 0;
    bool durable = false;
    for (std::uint64_t place = position_; place < bytes_.size() && !durable; place += kRecordStep) {
      record = at(place, &end);
      if (!record || record->sequence < expected_) continue;
      if (!first) first = record, first_begin = place, first_end = end;
      durable = record->sequence - record->place > expected_;
    }
    if (!durable) return std::nullopt;
    damaged_ = true;
    record = first;
    begin = first_begin;
    end = first_end;
  }
  mend(begin, end);
  position_ = end;
  expected_ = record->sequence + 1;
  return record;
}

// Replaces the log's bytes [begin, end) by the copy's, unless the log has a valid record there. The size of the log is
// a multiple of kRecordStep, as is `end`, so the log has room for the record.
void LogWalk::mend(std::uint64_t begin, std::uint64_t end) {
  std::uint64_t its = 0;
  if (at(bytes_, begin, &its)) return;
  std::copy_n(copy_.begin() + static_cast<std::ptrdiff_t>(begin), end - begin,
              bytes_.begin() + static_cast<std::ptrdiff_t>(begin));
  ++mended_;
}

}  // namespace ff::fs3::store
