// The result is the minimum of the memory that the machine and each control group leave. Without the kernel's files
// that report this memory, there is no limit.
#include "base/memory/available_memory.hpp"

#include <cstdint>
#include <filesystem>
#include <fstream>

#include "base/testing/check.hpp"
#include "base/testing/one_thread.hpp"

namespace {

namespace fs = std::filesystem;

void put(const fs::path& path, const std::string& text) {
  fs::create_directories(path.parent_path());
  std::ofstream(path) << text;
}

}  // namespace

int main() {
  char name[] = "/tmp/fireflyer-memory-test-XXXXXX";
  const fs::path root = ::mkdtemp(name);
  const auto found = [&root] { return ff::available_memory(root.string()); };
  CHECK(found() == SIZE_MAX);
  put(root / "proc/meminfo", "MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable: 5000 kB\nCached: 3 kB\n");
  CHECK(found() == 5000 << 10);
  put(root / "proc/self/cgroup", "1:cpu:/old\n0::/a/b\n");
  CHECK(found() == 5000 << 10);
  const fs::path a = root / "sys/fs/cgroup/a", b = a / "b";
  put(b / "memory.max", "max\n");
  put(b / "memory.current", "100\n");
  CHECK(found() == 5000 << 10);
  put(a / "memory.max", "1000000\n");
  put(a / "memory.current", "900000\n");
  put(a / "memory.stat", "anon 1\ninactive_file 300000\nactive_file 5\n");
  CHECK(found() == 400000);
  put(b / "memory.max", "300\n");
  CHECK(found() == 200);
  put(b / "memory.current", "400\n");
  CHECK(found() == 0);
  put(root / "proc/self/cgroup", "0::/\n");
  CHECK(found() == 5000 << 10);
  fs::remove_all(root);
  CHECK(ff::available_memory() > 0);
  return 0;
}
