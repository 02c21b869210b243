// A kernel ring (io_uring) for reads and writes, by the raw system calls.
//
// Thread contract: one thread at a time, any thread. A ring belongs to the process that made it: a forked child has
// neither the ring's memory nor its descriptor (base/process/fork_guard.hpp), see own().
#pragma once

#include <functional>
#include <memory>

#include "base/io/io_queue.hpp"

struct io_uring_params;

namespace ff::uring {

// The system calls, for tests to replace. They return their result or a negative error number.
struct Calls {
  std::function<int(unsigned entries, io_uring_params* params)> setup;
  std::function<int(int fd, unsigned submit, unsigned wanted, unsigned flags)> enter;
};
const Calls& kernel();

// Returns a ring for `entries` requests at a time (a power of two). Returns nullptr if the kernel has no rings, forbids
// them (ENOSYS, EPERM, EACCES) or has no memory for one.
std::unique_ptr<IoQueue> make(unsigned entries, const Calls& calls = kernel());

}  // namespace ff::uring
