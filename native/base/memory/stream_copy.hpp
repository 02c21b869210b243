// Copies of memory that is not used again soon: stores that bypass the caches, so that the target is not read first.
//
// Thread contract: the functions do not synchronize. Call stream_fence() before telling another thread that the bytes
// are in place.
#pragma once

#include <cstddef>

namespace ff {

// Copies bytes that do not overlap. Pieces below 4096 bytes go through the caches.
void stream_copy(char* to, const char* from, std::size_t bytes);
// Like stream_copy, but stores only where the bytes differ; returns whether any byte did.
bool stream_update(char* to, const char* from, std::size_t bytes);
// Orders the calling thread's earlier copies before its later stores.
void stream_fence();

}  // namespace ff
