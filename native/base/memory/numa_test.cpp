#include "base/memory/numa.hpp"

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>

#include "base/error.hpp"
#include "base/memory/segment.hpp"
#include "base/testing/check.hpp"
#include "base/testing/one_thread.hpp"

namespace {

namespace fs = std::filesystem;
using ff::numa::Mode;
using ff::numa::Policy;

constexpr int kSkipped = 77;  // as in CMakeLists.txt

struct Folder {
  fs::path path;
  Folder() {
    char name[] = "/tmp/numa-test-XXXXXX";
    CHECK(::mkdtemp(name) != nullptr);
    path = name;
  }
  ~Folder() { fs::remove_all(path); }
  void write(const std::string& file, const std::string& text) const {
    fs::create_directories((path / file).parent_path());
    std::ofstream(path / file) << text;
  }
};

// Calls of a kernel that reports `mask` as the allowed nodes, or that fails with `result`.
ff::numa::Calls allowing(unsigned long mask, long result) {
  ff::numa::Calls calls;
  calls.get_mempolicy = [=](int*, unsigned long* out, unsigned long bits, void*, unsigned flags) {
    CHECK(flags == MPOL_F_MEMS_ALLOWED && bits > 64);
    if (result == 0) out[0] = mask;
    return result;
  };
  return calls;
}

void nodes_are_those_with_memory_that_are_allowed() {
  const Folder folder;
  const auto all = allowing(~0ul, 0);
  CHECK(ff::numa::nodes(folder.path, all).empty());
  folder.write("has_memory", "0\n");
  CHECK((ff::numa::nodes(folder.path, all) == std::vector{0}));
  folder.write("has_memory", "0-2,5,8-9\n");
  CHECK((ff::numa::nodes(folder.path, all) == std::vector{0, 1, 2, 5, 8, 9}));
  CHECK((ff::numa::nodes(folder.path, allowing(0b100010, 0)) == std::vector{1, 5}));
  CHECK((ff::numa::nodes(folder.path, allowing(0, -EPERM)) == std::vector{0, 1, 2, 5, 8, 9}));
  folder.write("has_memory", "\n");
  CHECK(ff::numa::nodes(folder.path, all).empty());
}

void nodes_of_interfaces() {
  const Folder folder;
  folder.write("eth0/device/numa_node", "1\n");
  folder.write("eth1/device/numa_node", "-1\n");
  fs::create_directories(folder.path / "lo");
  fs::create_directories(folder.path / "bond0");
  fs::create_directory_symlink("../eth1", folder.path / "bond0/lower_eth1");
  fs::create_directory_symlink("../eth0", folder.path / "bond0/lower_eth0");
  fs::create_directories(folder.path / "odd");
  fs::create_directory_symlink("../odd", folder.path / "odd/lower_odd");
  const std::string root = folder.path;
  CHECK(ff::numa::node_of_interface("eth0", root) == 1);
  CHECK(ff::numa::node_of_interface("bond0", root) == 1);
  for (const char* none : {"eth1", "lo", "odd", "gone"}) {
    CHECK(ff::numa::node_of_interface(none, root) == -1);
  }
}

void what_the_kernel_is_told() {
  char memory;
  long answer = 0;
  ff::numa::Calls calls;
  calls.mbind = [&](void* start, unsigned long bytes, int mode, const unsigned long* mask, unsigned long bits,
                    unsigned flags) {
    CHECK(start == &memory && bytes == 8192 && flags == 0);
    CHECK(mode == MPOL_INTERLEAVE && bits == 1025);  // the kernel subtracts one
    CHECK(mask[0] == 0b1001 && mask[1] == 0b10 && mask[15] == 1ul << 63);
    return answer;
  };
  const Policy policy{Mode::interleave, {0, 3, 65, 1023}};
  ff::numa::set_policy(&memory, 8192, policy, calls);
  for (const auto& [error, code] : {std::pair{EPERM, ff::Code::storage}, std::pair{ENOMEM, ff::Code::no_space}}) {
    answer = -error;
    try {
      ff::numa::set_policy(&memory, 8192, policy, calls);
      CHECK(false);
    } catch (const ff::Error& caught) {
      CHECK(caught.code() == code);
    }
  }
  for (const int node : {-1, 1024}) {
    try {
      ff::numa::set_policy(&memory, 8192, {Mode::bind, {node}}, calls);
      CHECK(false);
    } catch (const ff::Error& caught) {
      CHECK(caught.code() == ff::Code::invalid);
    }
  }
}

void a_segment_is_placed_before_it_has_pages() {
  constexpr std::size_t kBytes = 16 * 4096;
  std::size_t resident = 99;
  const ff::Segment segment = ff::Segment::create("test", kBytes, [&](char* data) {
    unsigned char pages[16];
    CHECK(::mincore(data, kBytes, pages) == 0);
    resident = 0;
    for (const unsigned char page : pages) resident += page & 1;
  });
  CHECK(resident == 0 && segment.size() == kBytes);
  for (std::size_t i = 0; i < kBytes; ++i) CHECK(segment.data()[i] == 0);
}

void a_segment_that_cannot_be_placed_leaves_nothing() {
  const int before = ::dup(0);
  ::close(before);
  try {
    ff::Segment::create("test", 4096, [](char*) { throw ff::Error(ff::Code::storage, "no"); });
    CHECK(false);
  } catch (const ff::Error& caught) {
    CHECK(caught.code() == ff::Code::storage);
  }
  const int after = ::dup(0);
  ::close(after);
  CHECK(before == after);
}

bool forbidden() {
  char* page = static_cast<char*>(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  const unsigned long node = 1;
  const long refused = ff::numa::kernel().mbind(page, 4096, MPOL_BIND, &node, 65, 0);
  ::munmap(page, 4096);
  return refused == -EPERM || refused == -ENOSYS;
}

// With the real calls, a policy set through one mapping belongs to the memory: another mapping sees it.
void the_kernel_keeps_a_policy() {
  const Policy wanted{Mode::bind, {0}};
  const ff::Segment segment =
      ff::Segment::create("test", 2 * 4096, [&](char* data) { ff::numa::set_policy(data + 4096, 4096, wanted); });
  const ff::Segment again = ff::Segment::attach(::dup(segment.fd()));
  for (const ff::Segment* mapped : {&segment, &again}) {
    CHECK(ff::numa::policy_at(mapped->data() + 4096) == wanted);
    CHECK(ff::numa::policy_at(mapped->data()).nodes.empty());
  }
}

}  // namespace

int main() {
  nodes_are_those_with_memory_that_are_allowed();
  nodes_of_interfaces();
  what_the_kernel_is_told();
  a_segment_is_placed_before_it_has_pages();
  a_segment_that_cannot_be_placed_leaves_nothing();
  if (forbidden()) {
    std::puts("skipped: this kernel forbids memory policies");
    return kSkipped;
  }
  the_kernel_keeps_a_policy();
}
