// The process's pool of threads for work that is too slow on one thread. Threads start with the first work that needs
// them, at most kMost, and stay. A forked child starts threads of its own.
//
// Thread contract: any number of threads may call `share` at once; the workers take the oldest work first.
#pragma once

#include <cstddef>
#include <functional>

namespace ff::worker_pool {

constexpr unsigned kMost = 16;

// Returns the number of cores that the calling thread may use.
unsigned cores();

// Calls part(0) .. part(parts - 1), each once, on the calling thread and up to `threads - 1` workers; returns when all
// have ended. A call needs no free worker: the calling thread runs every part that no worker takes. An exception ends
// the work: parts that have not begun are skipped, and the first exception is thrown here.
void share(unsigned threads, std::size_t parts, const std::function<void(std::size_t)>& part);

}  // namespace ff::worker_pool
