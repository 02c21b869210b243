// Copies of memory that is not used again soon: stores that bypass the caches, so that the target is not read first.
//
// Thread contract: the functions do not synchronize. Call stream_fence() before telling another thread that the bytes
// are in place.
#pragma once

#include <cstddef>

namespace ff {

void stream_copy(char* to, const char* from, std::size_t bytes);
// Like stream_copy, but stores only where the bytes differ; returns whether any byte did.
bool stream_update(char* to, const char* from, std::size_t bytes);
void stream_fence();

}  // namespace ff
