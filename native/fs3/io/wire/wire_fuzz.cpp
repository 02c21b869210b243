// Fuzzer of the input of data connections. Any bytes become valid frames or end the connection, within the memory that
// the protocol allows. Inputs start as valid frames of every kind.
// The entry point is libFuzzer's. Without libFuzzer, base/testing/fuzz_driver.hpp mutates valid frames from seeds.
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <span>
#include <vector>

#include "base/crc/crc32c.hpp"
#include "base/testing/check.hpp"
#include "base/testing/fuzz_driver.hpp"
#include "base/testing/one_thread.hpp"
#include "fs3/io/wire/frame_connection.hpp"
#include "fs3/io/wire/messages.hpp"

namespace {

using namespace ff::fs3;
using namespace ff::fs3::io;
using Bytes = std::vector<std::uint8_t>;
using Random = std::mt19937_64;

// Reads the parts of a WRITE that a service reads after `sound_write` has accepted the frame.
void use_write(const Frame& frame) {
  const std::size_t count = frame.head.count;
  std::uint64_t from = 0, crc_at = count * sizeof(WriteEntry);
  volatile std::uint32_t sum = 0;  // makes the compiler keep the reads
  for (std::size_t n = 0; n < count; ++n) {
    const auto entry = at<WriteEntry>(frame.table, n);
    CHECK(std::uint64_t{entry.offset} + entry.length <= kLargestChunk);
    if (entry.kind != Kind::write) continue;
    for (std::uint32_t crc = 0; crc < entry.crcs; ++crc) sum = sum ^ at<std::uint32_t>(frame.table, crc, crc_at);
    CHECK(from + entry.length <= frame.head.payload_bytes);
    if (entry.length != 0) sum = sum ^ ff::crc32c(0, frame.payload.data() + from, entry.length);
    from += entry.length;
    crc_at += entry.crcs * sizeof(std::uint32_t);
    CHECK(crc_at <= frame.table.size());
  }
  CHECK(from == frame.head.payload_bytes && crc_at == frame.table.size());
}

void use_message(const Frame& frame) {
  const auto posted = decode(frame.table);
  if (posted) CHECK(encode(*posted) == frame.table);
  const std::span payload(frame.payload.data(), static_cast<std::size_t>(frame.head.payload_bytes));
  const auto tags = decode_tags(payload);
  if (!tags) return;
  const auto again = encode_tags(*tags);
  CHECK(std::equal(again.begin(), again.end(), payload.begin(), payload.end()));
}

void use(const Frame& frame) {
  CHECK(sound(frame.head) && frame.table.size() == frame.head.table_bytes);
  switch (frame.head.kind) {
    case FrameKind::read:
      if (!sound_read(frame.head, frame.table)) return;
      for (std::size_t n = 0; n < frame.head.count; ++n) CHECK(at<ReadEntry>(frame.table, n).length <= kLargestChunk);
      return;
    case FrameKind::write:
      if (sound_write(frame.head, frame.table)) use_write(frame);
      return;
    case FrameKind::read_answer: {
      if (!sound_read_answer(frame.head, frame.table)) return;
      std::uint64_t crcs = 0;
      for (std::size_t n = 0; n < frame.head.count; ++n) crcs += at<ReadAnswer>(frame.table, n).crcs;
      CHECK(frame.head.count * sizeof(ReadAnswer) + crcs * 4 == frame.table.size());
      return;
    }
    case FrameKind::query_answer:
      for (std::size_t n = 0; n < frame.head.count; ++n) {
        const auto answer = at<QueryAnswer>(frame.table, n);
        if (answer.status != Status::ok || !sound_query_answer(answer, 100, 7)) continue;
        CHECK(answer.index <= 100 && answer.run >= 1 && (answer.run - 1) * 7 <= answer.index);
      }
      return;
    case FrameKind::message: use_message(frame); return;
    case FrameKind::ready:
    case FrameKind::go: CHECK(frame.head.count == 1 && frame.table.empty() && frame.head.payload_bytes == 0); return;
    default: CHECK(frame.head.payload_bytes == 0);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static Pool pool(std::size_t{8} << 20);
  int ends[2];
  CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
  {
    FrameConnection line(ends[0], [](const Head&) -> Pool& { return pool; });
    Frame frame;
    for (std::size_t sent = 0; sent < size;) {
      const auto now = ::send(ends[1], data + sent, std::min<std::size_t>(size - sent, 777), MSG_NOSIGNAL);
      if (now > 0) sent += static_cast<std::size_t>(now);
      FrameConnection::Got got;
      while ((got = line.receive(frame)) == FrameConnection::Got::frame) use(frame);
      if (got != FrameConnection::Got::nothing || now < 0)
        break;  // the stream ended, or it waits for memory that this frame holds
    }
  }
  ::close(ends[1]);
  return 0;
}

namespace {

void put(Bytes& to, const void* from, std::size_t bytes) {
  const auto* first = static_cast<const std::uint8_t*>(from);
  to.insert(to.end(), first, first + bytes);
}

Bytes frame_of(FrameKind kind, std::size_t count, const Bytes& table, const Bytes& payload = {}) {
  Head head;
  head.kind = kind;
  head.count = static_cast<std::uint16_t>(count);
  head.table_bytes = static_cast<std::uint32_t>(table.size());
  head.payload_bytes = payload.size();
  Bytes frame;
  put(frame, &head, sizeof head);
  frame.insert(frame.end(), table.begin(), table.end());
  frame.insert(frame.end(), payload.begin(), payload.end());
  return frame;
}

template <class Entry>
Bytes frame_with(FrameKind kind, std::size_t count, Entry entry) {
  Bytes table;
  for (std::size_t n = 0; n < count; ++n) put(table, &entry, sizeof entry);
  return frame_of(kind, count, table);
}

Bytes frame_of(replica::Message message, const Bytes& payload = {}, std::vector<std::uint32_t> crcs = {}) {
  const auto table = encode({256, std::move(message), std::move(crcs)});
  Bytes bytes;
  put(bytes, table.data(), table.size());
  return frame_of(FrameKind::message, 1, bytes, payload);
}

std::vector<Bytes> seeds() {
  std::vector<Bytes> good;
  good.push_back(frame_with(FrameKind::read, 3, ReadEntry{1, 2, 3, 4, 4000, 9000, 1}));
  good.push_back(frame_of(FrameKind::ready, 1, {}));
  good.push_back(frame_of(FrameKind::go, 1, {}));
  good.push_back(frame_with(FrameKind::report, 1, ReadEntry{1, 2, 3, 4, 0, 4096, 0}));
  good.push_back(frame_with(FrameKind::query_last, 5, QueryEntry{1, 2, 3, 9, 4}));
  good.push_back(frame_with(FrameKind::query_answer, 2, QueryAnswer{9, 2, 2, Status::ok, {}}));
  good.push_back(frame_with(FrameKind::write_answer, 2, WriteAnswer{1, 2, Status::ok, {}}));
  const Bytes bytes(5000, 7);
  {
    WriteEntry entry;
    entry.offset = 100;
    entry.length = static_cast<std::uint32_t>(bytes.size());
    entry.crcs = pieces(entry.offset, entry.length);
    Bytes table;
    put(table, &entry, sizeof entry);
    table.resize(table.size() + entry.crcs * 4, 9);
    good.push_back(frame_of(FrameKind::write, 1, table, bytes));
    ReadAnswer answer{1, 5000, 0, 5000, 2, Status::ok, {}};
    table.clear();
    put(table, &answer, sizeof answer);
    table.resize(table.size() + 8, 9);
    good.push_back(frame_of(FrameKind::read_answer, 1, table, bytes));
  }
  replica::Update update;
  update.length = 5000;
  good.push_back(frame_of(update, bytes, {1, 2}));
  good.push_back(frame_of(replica::Answer{}));
  good.push_back(frame_of(replica::PageAsk{}));
  replica::Page page;
  page.entries.resize(3);
  good.push_back(frame_of(page));
  const store::Tagged tagged;
  const auto tags = encode_tags({&tagged, 1});
  Bytes payload;
  put(payload, tags.data(), tags.size());
  good.push_back(frame_of(replica::SyncDone{}, payload));
  good.push_back(frame_of(replica::Fetch{}));
  good.push_back(frame_of(replica::Fetched{}, bytes, {1, 2}));
  good.push_back(frame_of(replica::TagsAsk{}));
  good.push_back(frame_of(replica::Tags{}, payload));
  return good;
}

// Makes one change, more often in heads and tables than in payloads.
void change(Bytes& stream, Random& random) {
  if (stream.empty()) return;
  const std::size_t reach = random() % 4 == 0 ? stream.size() : std::min<std::size_t>(stream.size(), 200);
  const std::size_t at = random() % reach;
  static constexpr std::uint64_t kNumbers[] = {0,          1,
                                               127,        128,
                                               129,        255,
                                               4095,       4096,
                                               1u << 20,   (4u << 20) + 1,
                                               64u << 20,  (64u << 20) + 1,
                                               1ull << 31, (1ull << 32) - 1,
                                               1ull << 63, ~0ull};
  switch (random() % 6) {
    case 0: stream[at] ^= static_cast<std::uint8_t>(1 << random() % 8); break;
    case 1: stream[at] = static_cast<std::uint8_t>(random()); break;
    case 2: stream.resize(at); break;
    case 3:
      stream.insert(stream.begin() + static_cast<std::ptrdiff_t>(at), random() % 9,
                    static_cast<std::uint8_t>(random()));
      break;
    default: {
      const std::uint64_t number = kNumbers[random() % std::size(kNumbers)];
      const std::size_t size = std::size_t{1} << random() % 4;
      const std::size_t field = at / size * size;
      if (field + size <= stream.size()) std::memcpy(stream.data() + field, &number, size);
    }
  }
}

// Returns some frames one after the other, with changes.
Bytes stream_of(Random& random) {
  static const std::vector<Bytes> good = seeds();
  Bytes stream;
  for (auto frames = random() % 3 + 1; frames > 0; --frames) {
    Bytes frame = good[random() % good.size()];
    for (auto changes = random() % 4; changes > 0; --changes) change(frame, random);
    stream.insert(stream.end(), frame.begin(), frame.end());
  }
  return stream;
}

}  // namespace

#ifdef FF_LIBFUZZER
extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t max_size);

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size, std::size_t max_size,
                                               unsigned seed) {
  Random random(seed);
  if (size >= sizeof(Head) && random() % 16 != 0) {
    if (random() % 2 == 0) return LLVMFuzzerMutate(data, size, max_size);
    Bytes stream(data, data + size);
    change(stream, random);
    stream.resize(std::min(stream.size(), max_size));
    std::copy(stream.begin(), stream.end(), data);
    return stream.size();
  }
  Bytes stream = stream_of(random);  // valid frames, because the corpus may be empty
  stream.resize(std::min(stream.size(), max_size));
  std::copy(stream.begin(), stream.end(), data);
  return stream.size();
}
#else
int main(int argc, char** argv) {
  return ff::fuzz_main(argc, argv, [](std::uint64_t seed) {
    Random random(seed);
    const Bytes stream = stream_of(random);
    LLVMFuzzerTestOneInput(stream.data(), stream.size());
  });
}
#endif
