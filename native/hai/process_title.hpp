#pragma once

#include <string_view>

namespace ff::hai {

// Has /proc show another command line and other first variables for this process, within the room that its
// execve left: what does not fit is cut off. Entries end with a NUL. The environment itself keeps its values, for
// it moves elsewhere first. What was there before is no longer shown. An empty environment leaves the shown one.
//
// REQUIRES: one thread.
// Throws std::system_error where /proc cannot be read.
void set_process_title(std::string_view arguments, std::string_view environment);

}  // namespace ff::hai
