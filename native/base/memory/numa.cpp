#include "base/memory/numa.hpp"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>

#include "base/error.hpp"

namespace ff::numa {
namespace {

constexpr std::size_t kNodes = 1024;  // maximum that a kernel can be built for
constexpr std::size_t kWord = 8 * sizeof(unsigned long);
constexpr int kLevels = 4;  // nesting depth of stacked interfaces

using Mask = std::array<unsigned long, kNodes / kWord>;
// The kernel reads one bit less than this argument says.
constexpr unsigned long kBits = kNodes + 1;

Mask mask_of(const std::vector<int>& list) {
  Mask mask{};
  for (const int node : list) {
    if (node < 0 || static_cast<std::size_t>(node) >= kNodes) {
      throw Error(Code::invalid, "there is no memory node " + std::to_string(node));
    }
    mask[static_cast<std::size_t>(node) / kWord] |= 1ul << (static_cast<std::size_t>(node) % kWord);
  }
  return mask;
}

std::vector<int> list_of(const Mask& mask) {
  std::vector<int> list;
  for (std::size_t node = 0; node < kNodes; ++node) {
    if ((mask[node / kWord] >> (node % kWord) & 1) != 0) list.push_back(static_cast<int>(node));
  }
  return list;
}

// Parses "0-1,4", the kernel's list format.
std::vector<int> parse_list(std::istream& text) {
  std::vector<int> list;
  int first = 0;
  while (text >> first) {
    int last = first;
    if (text.peek() == '-') {
      text.ignore();
      text >> last;
    }
    for (int node = first; node <= last; ++node) list.push_back(node);
    if (text.peek() != ',') break;
    text.ignore();
  }
  return list;
}

int node_of(const std::filesystem::path& interface, int levels) {
  std::ifstream file(interface / "device" / "numa_node");
  if (int node = -1; file >> node) return node;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(interface, none)) {
    if (levels == 0 || !entry.path().filename().string().starts_with("lower_")) continue;
    if (const int node = node_of(entry.path(), levels - 1); node >= 0) return node;
  }
  return -1;
}

long result_of(long value) { return value == 0 ? 0 : -errno; }

}  // namespace

const Calls& kernel() {
  static const Calls calls{
      [](void* start, unsigned long bytes, int mode, const unsigned long* mask, unsigned long bits, unsigned flags) {
        return result_of(::syscall(SYS_mbind, start, bytes, mode, mask, bits, flags));
      },
      [](int* mode, unsigned long* mask, unsigned long bits, void* address, unsigned flags) {
        return result_of(::syscall(SYS_get_mempolicy, mode, mask, bits, address, flags));
      }};
  return calls;
}

std::vector<int> nodes(const std::string& root, const Calls& calls) {
  std::ifstream file(root + "/has_memory");
  std::vector<int> list = parse_list(file);
  Mask allowed{};
  // If this call is refused, setting a policy is refused too, and set_policy reports that.
  if (calls.get_mempolicy(nullptr, allowed.data(), kBits, nullptr, MPOL_F_MEMS_ALLOWED) != 0) return list;
  const std::vector<int> own = list_of(allowed);
  std::erase_if(list, [&](int node) { return std::find(own.begin(), own.end(), node) == own.end(); });
  return list;
}

int node_of_interface(const std::string& name, const std::string& root) {
  return node_of(std::filesystem::path(root) / name, kLevels);
}

void set_policy(void* start, std::size_t bytes, const Policy& policy, const Calls& calls) {
  const Mask mask = mask_of(policy.nodes);
  const int mode = policy.mode == Mode::interleave ? MPOL_INTERLEAVE : MPOL_BIND;
  const long refused = calls.mbind(start, bytes, mode, mask.data(), kBits, 0);
  if (refused != 0) {
    throw_errno("cannot place " + std::to_string(bytes) + " bytes on memory nodes", static_cast<int>(-refused));
  }
}

Policy policy_at(void* address, const Calls& calls) {
  Mask mask{};
  int mode = 0;
  const long refused = calls.get_mempolicy(&mode, mask.data(), kBits, address, MPOL_F_ADDR);
  if (refused != 0) throw_errno("cannot ask for the memory node of a page", static_cast<int>(-refused));
  return {mode == MPOL_INTERLEAVE ? Mode::interleave : Mode::bind, list_of(mask)};
}

}  // namespace ff::numa
