// Cores on which the library's own threads may run: one choice for the process, made before the threads start.
//
// Thread contract: both functions may be called from any thread.
#pragma once

#include <vector>

namespace ff::thread_cpus {

// Sets the cores of threads that call enter() from now on. An empty list allows all cores of the process.
void set(const std::vector<int>& cpus);
// Puts the calling thread, which has just started, on the chosen cores. Skips cores that it may not use (any more); if
// none remains, the thread stays where it is.
void enter();

}  // namespace ff::thread_cpus
