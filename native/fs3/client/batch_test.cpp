#include "fs3/client/batch.hpp"

#include "base/testing/check.hpp"
#include "base/error.hpp"
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

}  // namespace
}  // namespace ff::fs3::client

int main() {
  ff::fs3::client::a_range_is_cut_at_chunks();
  ff::fs3::client::what_no_file_has_is_refused();
}
