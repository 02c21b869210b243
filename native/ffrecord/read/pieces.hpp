// Batches assembled from pieces of cached chunk files, and the check of samples in place.
//
// Threads: both functions may run on any number of threads at once; they use threads of base/process/worker_pool.hpp.
// The functions keep no state, so they also work after fork.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace ff::ffrecord {

// Bytes [first, first + bytes) of a chunk; they go to `target` in the arena.
struct ChunkPiece {
  std::int64_t key;  // index of the chunk's key in `keys`
  std::int64_t chunk;
  std::int64_t first;
  std::int64_t bytes;
  std::int64_t target;
};
static_assert(sizeof(ChunkPiece) == 40);

// Returns the name of a chunk's file in the cache directory.
std::string chunk_name(const std::string& key, std::int64_t chunk);

struct PiecesRead {
  std::vector<std::uint8_t> found;  // for each piece: 1 if all of it was read
  int error = 0;                    // system error for an existing piece that could not be read
};

// Reads pieces from the chunk files in `directory`; opens each file once for all its pieces. Marks a file as used (by
// its modification time) if it was not marked recently. A file that another process deletes meanwhile is read whole or
// not found. REQUIRES: keys and places in the arena exist, pieces do not overlap.
PiecesRead read_pieces(const std::string& directory, const std::vector<std::string>& keys,
                       const std::vector<ChunkPiece>& pieces, std::uint8_t* arena);

// Returns 1 for each of `count` samples whose checksum matches, and 0 for the others. Sample i is
// [offsets[i], offsets[i + 1]) of the arena.
std::vector<std::uint8_t> check_samples(const std::uint8_t* arena, const std::int64_t* offsets,
                                        const std::uint32_t* crcs, std::size_t count);

}  // namespace ff::ffrecord
