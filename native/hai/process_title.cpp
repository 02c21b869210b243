#include "hai/process_title.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"

namespace ff::hai {

namespace {

struct Space {
  char* begin = nullptr;
  std::size_t size = 0;
};

struct Spaces {
  Space arguments, environment;
};

// Reads fields 48 to 51 of /proc/self/stat, counted from 1; field 2 may hold spaces and ends with the last ')'.
Spaces find_spaces() {
  std::ifstream file("/proc/self/stat");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  std::istringstream rest(text.substr(std::min(text.size(), text.rfind(')') + 1)));
  std::vector<std::string> fields{std::istream_iterator<std::string>(rest), {}};
  constexpr std::size_t first = 48 - 3;
  if (fields.size() < first + 4) {
    errno = ENODATA;
    throw_errno("cannot read /proc/self/stat");
  }
  const auto address = [&](std::size_t at) {
    return reinterpret_cast<char*>(std::stoull(fields[first + at]));  // NOLINT(performance-no-int-to-ptr)
  };
  return {{address(0), static_cast<std::size_t>(address(1) - address(0))},
          {address(2), static_cast<std::size_t>(address(3) - address(2))}};
}

// Copies `environ`, because its strings are in the memory to be overwritten. The copies are never freed, because
// callers of getenv may hold pointers to them.
void move_environment() {
  static bool moved = false;
  if (std::exchange(moved, true)) return;
  std::size_t count = 0;
  while (environ[count] != nullptr) ++count;
  auto** copy = static_cast<char**>(std::malloc((count + 1) * sizeof(char*)));
  if (copy == nullptr) throw_errno("cannot copy the environment");
  for (std::size_t i = 0; i < count; ++i) copy[i] = ::strdup(environ[i]);
  copy[count] = nullptr;
  environ = copy;
}

// Cuts the text at an entry's end, so that no entry is shown in part. The last byte of the space stays 0.
void fill(Space space, std::string_view text) {
  if (space.size == 0) return;
  if (text.size() >= space.size) {
    const auto end = text.rfind('\0', space.size - 1);
    text = text.substr(0, end == std::string_view::npos ? 0 : end + 1);
  }
  std::memcpy(space.begin, text.data(), text.size());
  std::memset(space.begin + text.size(), 0, space.size - text.size());
}

}  // namespace

void set_process_title(std::string_view arguments, std::string_view environment) {
  const Spaces found = find_spaces();
  move_environment();
  fill(found.arguments, arguments);
  if (!environment.empty()) fill(found.environment, environment);
}

}  // namespace ff::hai
