#include "fs3/client/batch.hpp"

#include <string>
#include <vector>

#include "base/crc/crc32c.hpp"
#include "base/error.hpp"
#include "base/testing/check.hpp"
#include "base/testing/one_thread.hpp"

namespace ff::fs3::client {
namespace {

template <class Act>
bool refused(const Act& act) {
  try {
    act();
  } catch (const Error& error) {
    return error.code() == Code::invalid;
  }
  return false;
}

void a_range_is_cut_at_chunks() {
  const FileMap file(7, 4096, {5, 6, 9}), other(8, 8192, {1});
  const FileMap* const files[] = {&file, &other};
  std::byte memory[20000];
  const Range ranges[] = {{0, 4000, 8300, memory}, {1, 8192, 10, memory + 9000}, {0, 50, 0, memory}};
  const auto pieces = split(files, ranges);
  CHECK(pieces.size() == 5);
  const std::uint32_t index[] = {0, 1, 2, 3, 1}, chain[] = {5, 6, 9, 5, 1}, offset[] = {4000, 0, 0, 0, 0};
  const std::uint32_t length[] = {96, 4096, 4096, 12, 10};
  const std::size_t place[] = {0, 96, 4192, 8288, 9000};
  for (std::size_t n = 0; n < 5; ++n) {
    CHECK(pieces[n].chunk == (ChunkId{n == 4 ? 8u : 7u, index[n]}) && pieces[n].chain == chain[n]);
    CHECK(pieces[n].offset == offset[n] && pieces[n].length == length[n] && pieces[n].memory == memory + place[n]);
  }
}

void what_no_file_has_is_refused() {
  const FileMap file(7, 4096, {5});
  const FileMap* const files[] = {&file};
  const auto bad = [&](std::size_t which, std::int64_t offset, std::int64_t bytes) {
    const Range range{which, offset, bytes, nullptr};
    return refused([&] { split(files, {&range, 1}); });
  };
  CHECK(bad(1, 0, 1) && bad(0, -1, 1) && bad(0, 0, -1) && bad(0, INT64_MAX, 1) && bad(0, std::int64_t{1} << 44, 1));
  CHECK(!bad(0, (std::int64_t{1} << 44) - 1, 1));
  CHECK(refused([] { FileMap(1, 4096, {}); }) && refused([] { FileMap(1, 5000, {1}); }));
  CHECK(refused([] { FileMap(1, 2048, {1}); }) && refused([] { FileMap(1, std::uint64_t{128} << 20, {1}); }));
}

void ranges_have_the_sums_of_their_pieces() {
  const FileMap file(7, 4096, {5});
  const FileMap* const files[] = {&file};
  const std::string text(9001, 'x');
  const Range ranges[] = {{0, 4000, 5000, nullptr}, {0, 0, 0, nullptr}, {0, 8192, 4001, nullptr}};
  Pieces read{split(files, ranges)};
  const std::int64_t bytes[] = {5000, 0, 4001}, more[] = {5000, 0, 4002}, others[] = {4999, 1, 4001};
  const std::uint32_t starts[] = {1, 2, 3};
  for (io::Piece& piece : read.pieces) piece.crc = crc32c(0, text.data(), piece.length);
  CHECK(refused([&] { read.sums(bytes, starts); }));
  for (io::Piece& piece : read.pieces) piece.outcome = io::Outcome::ok;
  const std::vector<std::uint32_t> sums = read.sums(bytes, starts);
  CHECK(sums == (std::vector<std::uint32_t>{crc32c(1, text.data(), 5000), 2, crc32c(3, text.data(), 4001)}));
  CHECK(refused([&] { read.sums(more, starts); }) && refused([&] { read.sums(others, starts); }));
  CHECK(refused([&] { read.sums({bytes, 2}, starts); }));
}

}  // namespace
}  // namespace ff::fs3::client

int main() {
  ff::fs3::client::a_range_is_cut_at_chunks();
  ff::fs3::client::what_no_file_has_is_refused();
  ff::fs3::client::ranges_have_the_sums_of_their_pieces();
}
