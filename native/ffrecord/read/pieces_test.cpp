#include "ffrecord/read/pieces.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <thread>

#include "base/crc/crc32.hpp"
#include "base/testing/check.hpp"

namespace {

using ff::ffrecord::ChunkPiece;

constexpr std::int64_t kChunk = 100'000;

unsigned char byte_of(std::int64_t chunk, std::int64_t at) {
  return static_cast<unsigned char>(chunk * 31 + at * 7 + at / 251);
}

void write_chunk(const std::string& directory, const std::string& key, std::int64_t chunk, std::int64_t bytes) {
  std::string content;
  for (std::int64_t at = 0; at < bytes; ++at) content.push_back(static_cast<char>(byte_of(chunk, at)));
  const std::string path = directory + "/" + ff::ffrecord::chunk_name(key, chunk);
  std::ofstream(path + ".tmp", std::ios::binary) << content;
  CHECK(::rename((path + ".tmp").c_str(), path.c_str()) == 0);
}

// Returns pieces of 40 chunks, with targets in the order of the pieces. Chunk 4 will be too short, chunk 3 missing.
std::vector<ChunkPiece> pieces_of(std::int64_t& bytes) {
  std::vector<ChunkPiece> pieces;
  bytes = 0;
  for (std::int64_t i = 0; i < 400; ++i) {
    const std::int64_t first = i * 977 % kChunk;
    const std::int64_t size = std::min<std::int64_t>(i * 131 % 9000, kChunk - first);
    pieces.push_back({0, i * 7 % 40, first, size, bytes});
    bytes += size;
  }
  return pieces;
}

void check_read(const std::string& directory, const std::string& key, bool others_delete) {
  std::int64_t bytes = 0;
  const std::vector<ChunkPiece> pieces = pieces_of(bytes);
  std::vector<std::uint8_t> arena(static_cast<std::size_t>(bytes));
  const auto result = ff::ffrecord::read_pieces(directory, {key}, pieces, arena.data());
  CHECK(result.error == 0);
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const ChunkPiece& piece = pieces[i];
    const std::int64_t length = piece.chunk == 3 ? -1 : piece.chunk == 4 ? kChunk / 2 : kChunk;
    const bool there = piece.first + piece.bytes <= length;
    CHECK(result.found[i] == there || (others_delete && !result.found[i]));
    if (!result.found[i]) continue;
    for (std::int64_t at = 0; at < piece.bytes; ++at)
      CHECK(arena[static_cast<std::size_t>(piece.target + at)] == byte_of(piece.chunk, piece.first + at));
  }
}

}  // namespace

int main() {
  char pattern[] = "/tmp/pieces-test-XXXXXX";
  const std::string directory = ::mkdtemp(pattern);
  const std::string key = "ab12";
  CHECK(ff::ffrecord::chunk_name(key, 12) == "ab/ab12-000000000012.chunk");
  CHECK(::mkdir((directory + "/ab").c_str(), 0700) == 0);
  const auto length = [](std::int64_t chunk) { return chunk == 4 ? kChunk / 2 : kChunk; };
  for (std::int64_t chunk = 0; chunk < 40; ++chunk)
    if (chunk != 3) write_chunk(directory, key, chunk, length(chunk));
  check_read(directory, key, false);

  // While other threads delete chunks and restore them, a piece is whole or missing.
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i)
    threads.emplace_back([&] {
      for (int k = 0; k < 5; ++k) check_read(directory, key, true);
    });
  threads.emplace_back([&] {
    for (std::int64_t round = 0; round < 100; ++round) {
      const std::int64_t chunk = 5 + round % 30;
      CHECK(::unlink((directory + "/" + ff::ffrecord::chunk_name(key, chunk)).c_str()) == 0);
      write_chunk(directory, key, chunk, length(chunk));
    }
  });
  for (std::thread& thread : threads) thread.join();
  check_read(directory, key, false);

  // A missing directory and an unreadable chunk are errors.
  std::uint8_t one = 0;
  CHECK(ff::ffrecord::read_pieces(directory + "/none", {key}, {{0, 0, 0, 1, 0}}, &one).error == ENOENT);
  CHECK(::mkdir((directory + "/" + ff::ffrecord::chunk_name(key, 3)).c_str(), 0700) == 0);
  const auto barred = ff::ffrecord::read_pieces(directory, {key}, {{0, 3, 0, 1, 0}}, &one);
  CHECK(barred.error == EISDIR);
  CHECK(barred.found[0] == 0);
  CHECK(ff::ffrecord::read_pieces(directory, {}, {}, nullptr).error == 0);

  std::vector<std::uint8_t> arena(3'000'000);
  for (std::size_t i = 0; i < arena.size(); ++i) arena[i] = static_cast<std::uint8_t>(i * i);
  std::vector<std::int64_t> offsets = {0};
  std::vector<std::uint32_t> crcs;
  while (offsets.back() < static_cast<std::int64_t>(arena.size())) {
    const std::int64_t size = std::min<std::int64_t>(static_cast<std::int64_t>(crcs.size()) * 997 % 60'000,
                                                     static_cast<std::int64_t>(arena.size()) - offsets.back());
    crcs.push_back(ff::crc32(0, arena.data() + offsets.back(), static_cast<std::size_t>(size)));
    offsets.push_back(offsets.back() + size);
  }
  for (std::size_t wrong = 1; wrong < crcs.size(); ++wrong) {
    if (offsets[wrong + 1] == offsets[wrong]) continue;
    arena[static_cast<std::size_t>(offsets[wrong + 1] - 1)] ^= 4;
    const auto right = ff::ffrecord::check_samples(arena.data(), offsets.data(), crcs.data(), crcs.size());
    for (std::size_t i = 0; i < crcs.size(); ++i) CHECK(right[i] == (i != wrong));
    arena[static_cast<std::size_t>(offsets[wrong + 1] - 1)] ^= 4;
  }
  CHECK(std::system(("rm -r " + directory).c_str()) == 0);
  return 0;
}
