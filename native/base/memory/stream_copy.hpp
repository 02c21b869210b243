// Copies memory that is not used again soon. The stores bypass the caches, so the processor does not first read the
// target into them.
//
// Thread contract: the functions do not synchronize. Call stream_fence() before telling another thread that the bytes
// are in place.
#pragma once

#include <cstddef>

namespace ff {

// Copies bytes that do not overlap. Pieces below 4096 bytes go through the caches.
void stream_copy(char* to, const char* from, std::size_t bytes);
// Compares blocks of 16 KiB, and copies only the blocks that differ, through the caches. Returns whether any byte
// differed.
bool stream_update(char* to, const char* from, std::size_t bytes);
// Orders the calling thread's earlier copies before its later stores.
void stream_fence();

}  // namespace ff
