// Operations of the key-value store and their encoding. No state; any thread.
//
// An operation in the log: kind u8, key bytes u32, value bytes u32, expiry i64 (ms since 1970, 0: never), key, value.
// A record in a table is the same with its sequence number, u64, behind the expiry. All numbers are little-endian.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "base/error.hpp"

namespace ff::kv {

static_assert(std::endian::native == std::endian::little);

enum class Kind : std::uint8_t { put = 1, erase = 2 };

constexpr std::size_t kMostKey = 64 << 10;
constexpr std::size_t kMostValue = 64 << 20;

// Slices point into a memtable or a block, which the holder of the record keeps alive.
struct Record {
  std::string_view key, value;
  std::uint64_t sequence = 0;
  std::int64_t expires = 0;
  Kind kind = Kind::put;

  bool visible(std::int64_t now) const { return kind == Kind::put && (expires == 0 || expires > now); }
};

template <typename T>
void append(std::string& to, T number) {
  to.append(reinterpret_cast<const char*>(&number), sizeof number);
}

// Reads numbers and slices of untrusted bytes. Throws Error(corrupted) past the end.
class Parser {
 public:
  explicit Parser(std::string_view bytes) : rest_(bytes) {}
  bool empty() const { return rest_.empty(); }
  std::string_view slice(std::size_t size) {
    if (size > rest_.size()) throw Error(Code::corrupted, "a record ends beyond its frame");
    const std::string_view found = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return found;
  }
  template <typename T>
  T number() {
    T value;
    std::memcpy(&value, slice(sizeof value).data(), sizeof value);
    return value;
  }
  // Throws Error(corrupted) also for an unknown kind or a key of no bytes.
  Record record(bool with_sequence) {
    Record found;
    found.kind = static_cast<Kind>(number<std::uint8_t>());
    const auto key = number<std::uint32_t>(), value = number<std::uint32_t>();
    found.expires = number<std::int64_t>();
    if (with_sequence) found.sequence = number<std::uint64_t>();
    if ((found.kind != Kind::put && found.kind != Kind::erase) || key == 0 || key > kMostKey)
      throw Error(Code::corrupted, "a record has an invalid kind or key");
    found.key = slice(key);
    found.value = slice(value);
    return found;
  }

 private:
  std::string_view rest_;
};

}  // namespace ff::kv
