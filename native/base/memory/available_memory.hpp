// The amount of memory that this process can still allocate.
//
// Thread contract: any thread.
#pragma once

#include <cstddef>
#include <string>

namespace ff {

// Returns the bytes that can still be allocated without swapping and within the limits of the process's control groups
// (version 2). Returns SIZE_MAX if the kernel reports neither. `root` is a prefix of the kernel's paths, for tests.
std::size_t available_memory(const std::string& root = "");

}  // namespace ff
