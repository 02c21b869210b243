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

struct Room {
  char* begin = nullptr;
  std::size_t size = 0;
};

struct Rooms {
  Room arguments, environment;
};

// Fields 48 to 51 of /proc/self/stat, counted from 1; field 2 may hold spaces and ends with the last ')'.
Rooms rooms() {
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

// The strings of `environ` are in the memory to be overwritten. The copies are never freed, because callers of getenv
// may hold pointers to them.
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

// Cuts at an entry's end, so that none is shown in part; the last byte of the space stays 0.
void fill(Room room, std::string_view text) {
  if (room.size == 0) return;
  if (text.size() >= room.size) {
    const auto end = text.rfind('\0', room.size - 1);
    text = text.substr(0, end == std::string_view::npos ? 0 : end + 1);
  }
  std::memcpy(room.begin, text.data(), text.size());
  std::memset(room.begin + text.size(), 0, room.size - text.size());
}

}  // namespace

void set_process_title(std::string_view arguments, std::string_view environment) {
  const Rooms found = rooms();
  move_environment();
  fill(found.arguments, arguments);
  if (!environment.empty()) fill(found.environment, environment);
}

}  // namespace ff::hai
