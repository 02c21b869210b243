#pragma once

#include <string_view>

namespace ff::hai {

// Replaces the command line and the first environment variables that /proc shows for this process. The new texts are cut
// to the space that execve left. Entries end with a NUL. getenv() still finds the old variables, because the environment
// is moved elsewhere first. If `environment` is empty, /proc shows the old environment.
//
// REQUIRES: one thread.
// Throws std::system_error if /proc cannot be read.
void set_process_title(std::string_view arguments, std::string_view environment);

}  // namespace ff::hai
