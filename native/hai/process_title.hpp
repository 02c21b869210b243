#pragma once

#include <string_view>

namespace ff::hai {

// Makes /proc show another command line and other first environment variables for this process, within the space that
// its execve left; the rest is cut off. Entries end with a NUL. The environment keeps its values, because it is moved
// elsewhere first. The former contents are no longer shown. An empty `environment` leaves the shown one unchanged.
//
// REQUIRES: one thread.
// Throws std::system_error if /proc cannot be read.
void set_process_title(std::string_view arguments, std::string_view environment);

}  // namespace ff::hai
