// Reads a range of a file and computes its CRC32C, 256 KiB at a time: each piece is summed while it is in the core's cache.
//
// Thread contract: any thread, any number of calls at once; no state.
#pragma once

#include <cstdint>
#include <string>

namespace ff::storage {

// Fills `target` from byte `offset` on and returns the CRC32C of the bytes, continuing `start`. Throws Error: corrupted if
// the file ends before that, storage if it cannot be read.
std::uint32_t read_summed(const std::string& path, std::int64_t offset, std::int64_t bytes, char* target,
                          std::uint32_t start);

}  // namespace ff::storage
