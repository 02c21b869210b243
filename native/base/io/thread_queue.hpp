// Reads and writes on threads, for kernels that have no io_uring or forbid it.
//
// Thread contract: that of IoQueue. The threads live as long as the queue; a forked child has none of them, see own().
#pragma once

#include <memory>

#include "base/io/io_queue.hpp"

namespace ff::thread_queue {

// Returns a queue for `entries` requests at a time on up to `threads` threads. Throws Code::storage if not even one
// thread can be started.
std::unique_ptr<IoQueue> make(unsigned entries, unsigned threads);

}  // namespace ff::thread_queue
