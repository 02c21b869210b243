// Which memory nodes there are, and on which of them the pages of a range are made. By the kernel's own calls.
//
// Thread contract: all functions may be called from any thread. A policy counts for pages that do not exist yet; on
// shared memory it belongs to the memory, whoever touches it first.
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

// The system calls as the kernel has them, for tests to replace. They return 0 or a negative error number.
struct Calls {
  std::function<long(void* start, unsigned long bytes, int mode, const unsigned long* mask,
                     unsigned long bits, unsigned flags)>
      mbind;
  std::function<long(int* mode, unsigned long* mask, unsigned long bits, void* address, unsigned flags)>
      get_mempolicy;
};
const Calls& kernel();

// Nodes with memory that this process may use, ascending; none where the kernel knows no nodes.
std::vector<int> nodes(const std::string& root = "/sys/devices/system/node", const Calls& calls = kernel());
// Node of the card behind a network interface, also behind a bond or VLAN; -1: unknown, or it has none.
int node_of_interface(const std::string& name, const std::string& root = "/sys/class/net");

// For pages made from now on. REQUIRES: `start` is at the begin of a page. Throws what throw_errno does.
void set_policy(void* start, std::size_t bytes, const Policy& policy, const Calls& calls = kernel());
// The policy of the page at `address`; no nodes where it has none of its own.
Policy policy_at(void* address, const Calls& calls = kernel());

}  // namespace ff::numa
