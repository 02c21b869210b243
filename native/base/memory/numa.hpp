// NUMA memory nodes of the machine, and the policy that decides on which nodes the pages of a memory range are created.
// Uses system calls, not libnuma.
//
// Thread contract: all functions may be called from any thread. A policy applies to pages that do not exist yet. The
// policy of shared memory belongs to the memory, not to the mapping, so it also applies to pages that another process
// touches first.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

namespace ff::numa {

enum class Mode { interleave, bind };

struct Policy {
  Mode mode;
  std::vector<int> nodes;

  bool operator==(const Policy&) const = default;
};

// The system calls, for tests to replace. They return 0 or a negative error number.
struct Calls {
  std::function<long(void* start, unsigned long bytes, int mode, const unsigned long* mask, unsigned long bits,
                     unsigned flags)>
      mbind;
  std::function<long(int* mode, unsigned long* mask, unsigned long bits, void* address, unsigned flags)> get_mempolicy;
};
const Calls& kernel();

// Returns the nodes with memory that this process may use, ascending; empty if the kernel reports no nodes.
std::vector<int> nodes(const std::string& root = "/sys/devices/system/node", const Calls& calls = kernel());
// Returns the memory node of the card behind a network interface, also behind a bond or VLAN. Returns -1 if the
// interface has no card, or the card's node is unknown.
int node_of_interface(const std::string& name, const std::string& root = "/sys/class/net");

// Sets the policy for pages created from now on. REQUIRES: `start` is page-aligned. Throws what throw_errno does.
void set_policy(void* start, std::size_t bytes, const Policy& policy, const Calls& calls = kernel());
// Returns the policy of the page at `address`; without nodes if the page has no policy of its own.
Policy policy_at(void* address, const Calls& calls = kernel());

}  // namespace ff::numa
