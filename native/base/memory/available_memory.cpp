#include "base/memory/available_memory.hpp"

#include <algorithm>
#include <cstdint>
#include <fstream>

namespace ff {
namespace {

// Returns the number behind `key` in a file of lines "key number ..."; SIZE_MAX if there is none.
std::size_t number_of(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  std::string name, rest;
  std::size_t number = 0;
  while (file >> name >> number) {
    if (name == key) return number;
    std::getline(file, rest);
  }
  return SIZE_MAX;
}

// Returns the number in a file that holds only a number. Returns SIZE_MAX for other contents ("max") or a missing file.
std::size_t number_in(const std::string& path) {
  std::ifstream file(path);
  std::size_t number = 0;
  return file >> number ? number : SIZE_MAX;
}

// Returns "/a/b" of the line "0::/a/b".
std::string control_group(const std::string& root) {
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("0::/")) return line.substr(3);
  }
  return "";
}

// Returns the bytes left in one group. Inactive file pages count as free: the kernel reclaims them before it enforces
// the limit.
std::size_t left_in(const std::string& group) {
  const std::size_t limit = number_in(group + "/memory.max");
  const std::size_t used = number_in(group + "/memory.current");
  if (limit == SIZE_MAX || used == SIZE_MAX) return SIZE_MAX;
  const std::size_t files = number_of(group + "/memory.stat", "inactive_file");
  const std::size_t held = files == SIZE_MAX ? used : used - std::min(used, files);
  return limit - std::min(limit, held);
}

}  // namespace

std::size_t available_memory(const std::string& root) {
  const std::size_t kilobytes = number_of(root + "/proc/meminfo", "MemAvailable:");
  std::size_t least = kilobytes == SIZE_MAX ? SIZE_MAX : kilobytes << 10;
  for (std::string group = control_group(root); !group.empty(); group.resize(group.rfind('/'))) {
    least = std::min(least, left_in(root + "/sys/fs/cgroup" + group));
  }
  return least;
}

}  // namespace ff
