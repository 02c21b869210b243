// Where the library's own threads may run: one choice for the process, made before they start.
//
// Thread contract: both may be called from any thread.
#pragma once

#include <vector>

namespace ff::thread_cpus {

// For threads that enter from now on. Empty: wherever the process may run.
void set(const std::vector<int>& cpus);
// Puts the calling thread, which has just started, on the chosen cores. Cores that it may not use (any more) are
// left out; if none remains it stays where it is.
void enter();

}  // namespace ff::thread_cpus
