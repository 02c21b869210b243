// Recent operations in the order of their keys, each key with all its versions.
//
// Thread contract: `apply` excludes every other call; const calls may run at once. A memtable that takes no more
// operations may therefore be read by any number of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "kv/record.hpp"

namespace ff::kv {

class Memtable {
 public:
  struct Version {
    std::uint64_t sequence;
    std::int64_t expires;
    Kind kind;
    std::string value;
  };
  using Map = std::map<std::string, std::vector<Version>, std::less<>>;

  // Adds the operations of a log frame; they get consecutive sequence numbers from `sequence` on. Returns the number of
  // operations. If it throws Error(corrupted), it has changed nothing.
  std::uint64_t apply(std::string_view operations, std::uint64_t sequence);
  // Sets `found` to the key's newest version with a sequence number of at most `sequence`. Returns false if there is none.
  bool find(std::string_view key, std::uint64_t sequence, Record& found) const;
  // Returns the newest version with a sequence number of at most `sequence`, or nullptr.
  static const Version* newest(const std::vector<Version>& versions, std::uint64_t sequence);

  const Map& map() const { return map_; }
  std::size_t bytes() const { return bytes_; }  // approximately, with the nodes of the tree

 private:
  Map map_;
  std::size_t bytes_ = 0;
};

}  // namespace ff::kv
