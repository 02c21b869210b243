// How much memory this process can still be given.
//
// Thread contract: any thread.
#pragma once

#include <cstddef>
#include <string>

namespace ff {

// Bytes that can still be had without swapping and within the limits of the control groups (version 2) that the
// process is in; SIZE_MAX where the kernel does not say. `root` is put before the kernel's paths, for tests.
std::size_t available_memory(const std::string& root = "");

}  // namespace ff
