#include "kv/memtable.hpp"

namespace ff::kv {

namespace {
constexpr std::size_t kNode = 128;  // approximate bytes of a tree node, a vector and a version in the allocator
}

std::uint64_t Memtable::apply(std::string_view operations, std::uint64_t sequence) {
  for (Parser check(operations); !check.empty();) static_cast<void>(check.record(false));
  std::uint64_t count = 0;
  for (Parser parser(operations); !parser.empty(); ++count) {
    const Record record = parser.record(false);
    auto place = map_.find(record.key);
    if (place == map_.end()) {
      place = map_.emplace(std::string(record.key), std::vector<Version>()).first;
      bytes_ += record.key.size();
    }
    place->second.push_back({sequence + count, record.expires, record.kind, std::string(record.value)});
    bytes_ += record.value.size() + kNode;
  }
  return count;
}

const Memtable::Version* Memtable::newest(const std::vector<Version>& versions, std::uint64_t sequence) {
  for (auto version = versions.rbegin(); version != versions.rend(); ++version)
    if (version->sequence <= sequence) return &*version;
  return nullptr;
}

bool Memtable::find(std::string_view key, std::uint64_t sequence, Record& found) const {
  const auto place = map_.find(key);
  if (place == map_.end()) return false;
  const Version* const version = newest(place->second, sequence);
  if (version == nullptr) return false;
  found = {place->first, version->value, version->sequence, version->expires, version->kind};
  return true;
}

}  // namespace ff::kv
