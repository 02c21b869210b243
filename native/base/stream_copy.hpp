// Copies of memory that is not used again soon: stores that go past the caches, so that the target is not read first.
//
// Thread contract: none of their own; stream_fence() before another thread is told that the bytes are there.
#pragma once

#include <cstddef>

namespace ff {

void stream_copy(char* to, const char* from, std::size_t bytes);
// The same, but stores only where the bytes differ; returns whether any did.
bool stream_update(char* to, const char* from, std::size_t bytes);
void stream_fence();

}  // namespace ff
