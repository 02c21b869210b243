#include "fs3/store/layout/space.hpp"

#include <algorithm>

namespace ff::fs3::store {

Extent Space::take(std::uint8_t size_class) {
  Class& of = classes_[size_class];
  while (of.first < of.files.size() && of.files[of.first].taken == slots_per_file(size_class)) ++of.first;
  if (of.first == of.files.size()) of.files.emplace_back();
  Map& map = of.files[of.first];
  while (map.first < map.words.size() && map.words[map.first] == ~std::uint64_t{0}) ++map.first;
  std::size_t bit = 0;
  if (map.first < map.words.size()) bit = static_cast<std::size_t>(std::countr_one(map.words[map.first]));
  const Extent extent{static_cast<std::uint32_t>(of.first), static_cast<std::uint16_t>(map.first * 64 + bit),
                      size_class};
  mark(extent);
  return extent;
}

bool Space::mark(Extent extent) {
  Class& of = classes_[extent.size_class];
  if (extent.file >= of.files.size()) of.files.resize(extent.file + std::size_t{1});
  Map& map = of.files[extent.file];
  const std::size_t word = extent.slot / 64;
  if (word >= map.words.size()) map.words.resize(word + 1);
  const std::uint64_t bit = std::uint64_t{1} << (extent.slot % 64);
  if (map.words[word] & bit) return false;
  map.words[word] |= bit;
  ++map.taken;
  ++taken_;
  taken_bytes_ += extent.stride();
  return true;
}

void Space::free(Extent extent) {
  Class& of = classes_[extent.size_class];
  Map& map = of.files[extent.file];
  map.words[extent.slot / 64] &= ~(std::uint64_t{1} << (extent.slot % 64));
  --map.taken;
  map.first = std::min<std::size_t>(map.first, extent.slot / 64);
  of.first = std::min<std::size_t>(of.first, extent.file);
  --taken_;
  taken_bytes_ -= extent.stride();
}

}  // namespace ff::fs3::store
