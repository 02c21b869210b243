// Batches that come in pieces, from files that hold chunks of others, and are checked where they lie.
//
// Threads: both functions may run on any number of threads at once; while they run they use those of
// base/worker_pool.hpp. They keep no state, so also after fork.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace ff::ffrecord {

// Bytes [first, first + bytes) of a chunk, which go to `target` of the arena.
struct ChunkPiece {
  std::int64_t key;  // its number among the keys
  std::int64_t chunk;
  std::int64_t first;
  std::int64_t bytes;
  std::int64_t target;
};
static_assert(sizeof(ChunkPiece) == 40);

// The file of a chunk in the directory of a cache.
std::string chunk_name(const std::string& key, std::int64_t chunk);

struct PiecesRead {
  std::vector<std::uint8_t> found;  // for each piece: 1 if all of it was read
  int error = 0;                    // of the system for a piece that is there and could not be read
};

// Reads pieces from the chunk files in `directory`, each opened once for all its pieces that are wanted, and marks
// as used (by the time of its last change) a file not marked for a while. A file that others delete meanwhile is
// read whole or not found. REQUIRES: keys and places in the arena exist, pieces do not overlap.
PiecesRead read_pieces(const std::string& directory, const std::vector<std::string>& keys,
                       const std::vector<ChunkPiece>& pieces, std::uint8_t* arena);

// For each of `count` samples, one behind the other at `offsets`: 1 if it has its checksum.
std::vector<std::uint8_t> check_samples(const std::uint8_t* arena, const std::int64_t* offsets,
                                        const std::uint32_t* crcs, std::size_t count);

}  // namespace ff::ffrecord
