// Every combination of requested range, chunk length and step of arrival.
#include "fs3/io/client/read_placement.hpp"

#include <cstring>
#include <vector>

#include "base/testing/one_thread.hpp"
#include "fs3/io/client/scripted_node.hpp"

namespace ff::fs3::io {
namespace {

constexpr std::byte kGuard{0xA5};

struct Answered {
  Head head;
  Bytes table, payload;
};

Answered answer(const Bytes& chunk, std::uint32_t offset, std::uint32_t length) {
  Answered a;
  ReadAnswer r;
  r.chunk_length = static_cast<std::uint32_t>(chunk.size());
  r.offset = offset - offset % static_cast<std::uint32_t>(kBlock);
  const std::size_t end = std::min<std::size_t>((offset + length + kBlock - 1) / kBlock * kBlock, chunk.size());
  if (offset < chunk.size()) r.length = static_cast<std::uint32_t>(end - r.offset);
  r.crcs = pieces(r.offset, r.length);
  a.table.resize(sizeof r + r.crcs * 4);
  std::memcpy(a.table.data(), &r, sizeof r);
  for (std::size_t n = 0; n < r.crcs; ++n) {
    const std::size_t from = r.offset + n * kBlock;
    const std::uint32_t crc = crc32c(0, chunk.data() + from, std::min(kBlock, r.offset + r.length - from));
    std::memcpy(a.table.data() + sizeof r + 4 * n, &crc, 4);
  }
  a.payload.assign(chunk.begin() + r.offset, chunk.begin() + r.offset + r.length);
  a.head.kind = FrameKind::read_answer;
  a.head.count = 1;
  a.head.table_bytes = static_cast<std::uint32_t>(a.table.size());
  a.head.payload_bytes = a.payload.size();
  return a;
}

// Delivers the payload in steps of at most `step`; returns whether all of it was taken.
bool pour(ReadPlacement& landing, const Bytes& payload, std::size_t step) {
  std::size_t at = 0;
  while (!landing.done()) {
    const auto places = landing.places();
    std::size_t left = step, given = 0;
    for (const iovec& place : places) {
      const std::size_t bytes = std::min({left, place.iov_len, payload.size() - at});
      std::memcpy(place.iov_base, payload.data() + at, bytes);
      at += bytes;
      left -= bytes;
      given += bytes;
    }
    if (given == 0) return false;
    landing.landed(given);
  }
  return at == payload.size();
}

void each_cut_lands_in_its_place() {
  for (const std::size_t size :
       {std::size_t{0}, std::size_t{1}, kBlock - 1, kBlock, kBlock + 1, 3 * kBlock, 3 * kBlock + 17}) {
    const Bytes chunk = random_bytes(size, size + 1);
    for (const std::uint32_t offset : {0u, 1u, 4095u, 4096u, 4097u, 8192u, 12304u, 20000u}) {
      for (const std::uint32_t length : {1u, 100u, 4095u, 4096u, 4097u, 8192u, 16384u}) {
        for (const std::size_t step : {std::size_t{1 << 20}, std::size_t{4096}, std::size_t{777}}) {
          Bytes memory(length + 2, kGuard);
          Piece piece{.offset = offset, .length = length, .memory = memory.data() + 1};
          Piece* const pointer = &piece;
          ReadPlacement landing;
          const Answered a = answer(chunk, offset, length);
          CHECK(landing.begin(a.head, a.table, {&pointer, 1}));
          CHECK(pour(landing, a.payload, step));
          CHECK(piece.outcome == Outcome::ok && piece.chunk_length == size);
          CHECK(piece.crc == crc32c(0, memory.data() + 1, length));
          CHECK(memory.front() == kGuard && memory.back() == kGuard);
          for (std::size_t n = 0; n < length; ++n) {
            CHECK(memory[n + 1] == (offset + n < size ? chunk[offset + n] : std::byte{0}));
          }
        }
      }
    }
  }
}

void each_wrong_bit_is_found() {
  const Bytes chunk = random_bytes(2 * kBlock + 100, 3);
  for (std::size_t bad = 0; bad < chunk.size(); bad += 61) {
    Answered a = answer(chunk, 0, 3 * kBlock);
    a.payload[bad] ^= std::byte{4};
    Bytes memory(3 * kBlock);
    Piece piece{.length = 3 * kBlock, .memory = memory.data()};
    Piece* const pointer = &piece;
    ReadPlacement landing;
    CHECK(landing.begin(a.head, a.table, {&pointer, 1}));
    CHECK(pour(landing, a.payload, 1000));
    CHECK(piece.outcome == Outcome::mismatch);
  }
}

// Bytes are compared while they are in the cache: later changes of the memory have no effect.
void each_block_is_compared_when_it_came() {
  const Bytes chunk = random_bytes(3 * kBlock, 4);
  for (std::size_t bad = 0; bad < 3; ++bad) {
    const Answered a = answer(chunk, 0, 3 * kBlock);
    Bytes memory(3 * kBlock);
    Piece piece{.length = 3 * kBlock, .memory = memory.data()};
    Piece* const pointer = &piece;
    ReadPlacement landing;
    CHECK(landing.begin(a.head, a.table, {&pointer, 1}));
    for (std::size_t block = 0; block < 3; ++block) {
      std::byte* const place = static_cast<std::byte*>(landing.places().front().iov_base);
      std::memcpy(place, chunk.data() + block * kBlock, kBlock);
      if (block == bad) place[5] ^= std::byte{1};
      landing.landed(kBlock);
      place[5] = chunk[block * kBlock + 5];
    }
    CHECK(landing.done() && memory == chunk && piece.outcome == Outcome::mismatch);
  }
}

void an_answer_to_something_else_is_refused() {
  const Bytes chunk = random_bytes(3 * kBlock, 5);
  const Answered good = answer(chunk, kBlock, kBlock);
  const auto refused = [&](auto change) {
    ReadAnswer entry = at<ReadAnswer>(good.table, 0);
    change(entry);
    Bytes table(sizeof entry + entry.crcs * 4);
    std::memcpy(table.data(), &entry, sizeof entry);
    Head head = good.head;
    head.table_bytes = static_cast<std::uint32_t>(table.size());
    head.payload_bytes = entry.length;
    Bytes memory(kBlock, kGuard);
    Piece piece{.offset = kBlock, .length = kBlock, .memory = memory.data()};
    Piece* const pointer = &piece;
    ReadPlacement landing;
    return !landing.begin(head, table, {&pointer, 1}) && piece.outcome == Outcome::open && memory[0] == kGuard;
  };
  CHECK(!refused([](ReadAnswer&) {}));
  CHECK(refused([](ReadAnswer& entry) { entry.offset = 0; }));
  CHECK(refused([](ReadAnswer& entry) { entry.offset = 2 * kBlock; }));
  CHECK(refused([](ReadAnswer& entry) { entry.length = 2 * kBlock, entry.crcs = 2; }));
  CHECK(refused([](ReadAnswer& entry) { entry.length = 0, entry.crcs = 0; }));
  CHECK(refused([](ReadAnswer& entry) { entry.length = 100; }));
  CHECK(refused([](ReadAnswer& entry) { entry.chunk_length = kBlock; }));
  CHECK(refused([](ReadAnswer& entry) { entry.status = Status::not_found; }));
  CHECK(refused([](ReadAnswer& entry) { entry.status = static_cast<Status>(200), entry.length = 0, entry.crcs = 0; }));
}

void a_status_is_the_outcome() {
  for (const Status status : {Status::stale_routing, Status::corrupt, Status::io_error, Status::not_found}) {
    ReadAnswer entry;
    entry.status = status;
    entry.chunk_length = 77;  // without meaning if no bytes come
    Bytes table(sizeof entry), memory(64, kGuard);
    std::memcpy(table.data(), &entry, sizeof entry);
    Head head{.kind = FrameKind::read_answer, .count = 1, .table_bytes = sizeof entry};
    Piece piece{.length = 64, .memory = memory.data()};
    Piece* const pointer = &piece;
    ReadPlacement landing;
    CHECK(landing.begin(head, table, {&pointer, 1}) && landing.done());
    const bool hole = status == Status::not_found;
    CHECK(piece.outcome == (hole ? Outcome::ok : static_cast<Outcome>(status)));
    CHECK(memory == Bytes(64, hole ? std::byte{0} : kGuard));
    CHECK(!hole || piece.crc == crc32c(0, memory.data(), 64));
  }
}

}  // namespace
}  // namespace ff::fs3::io

int main() {
  using namespace ff::fs3::io;
  each_cut_lands_in_its_place();
  each_wrong_bit_is_found();
  each_block_is_compared_when_it_came();
  an_answer_to_something_else_is_refused();
  a_status_is_the_outcome();
}
