// The threads on which the process does what one thread would be too slow for. They start with the first work that
// wants them, at most kMost, and stay; a forked child starts its own.
//
// Thread contract: any number of threads may call `share` at once; the workers take the oldest work first.
#pragma once

#include <cstddef>
#include <functional>

namespace ff::worker_pool {

constexpr unsigned kMost = 16;

// Cores that the calling thread may use.
unsigned cores();

// Calls part(0) .. part(parts - 1), each once, on the calling thread and up to `threads - 1` others, and returns when
// all have ended. The caller needs no other thread to come to the end. An exception ends the work: the parts that
// have not begun are left out, the first exception is thrown here.
void share(unsigned threads, std::size_t parts, const std::function<void(std::size_t)>& part);

}  // namespace ff::worker_pool
