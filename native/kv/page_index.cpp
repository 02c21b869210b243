#include "kv/page_index.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.hpp"

namespace ff::kv {

namespace {

constexpr std::size_t kLeastSlots = 1024;

void check_digest(std::string_view digest) {
  if (digest.size() != kDigest) throw Error(Code::invalid, "a digest has 16 bytes");
}

}  // namespace

std::size_t PageIndex::home(const char* digest) const {  // digests are uniform: no further hash
  std::uint64_t word;
  std::memcpy(&word, digest, sizeof word);
  return static_cast<std::size_t>(word % slots_.size());
}

const PageIndex::Slot* PageIndex::probe(std::string_view digest) const {
  check_digest(digest);
  if (slots_.empty()) return nullptr;
  for (std::size_t at = home(digest.data()); slots_[at].taken; at = after(at))
    if (std::memcmp(slots_[at].digest, digest.data(), kDigest) == 0)
      return segments_.contains(slots_[at].segment) ? &slots_[at] : nullptr;
  return nullptr;
}

void PageIndex::count(std::uint32_t segment, std::uint32_t salt, std::int64_t pages, std::int64_t bytes) {
  Segment& its = segments_.at(segment);
  its.pages += static_cast<std::size_t>(pages);
  pages_ += static_cast<std::size_t>(pages);
  usage_[salt] += static_cast<std::uint64_t>(bytes);
  const auto place =
      std::find_if(its.usage.begin(), its.usage.end(), [salt](const auto& each) { return each.first == salt; });
  if (place == its.usage.end()) its.usage.emplace_back(salt, bytes);
  else place->second += static_cast<std::uint64_t>(bytes);
}

void PageIndex::lay() {
  std::vector<Slot> old = std::exchange(slots_, {});
  const std::size_t slots = std::max(kLeastSlots, (pages_ + 1) * 8 / 5);
  slots_.reserve(slots);
  slots_.resize(slots);
  taken_ = 0;
  for (const Slot& slot : old) {
    if (!slot.taken || !segments_.contains(slot.segment)) continue;
    std::size_t at = home(slot.digest);
    while (slots_[at].taken) at = after(at);
    slots_[at] = slot;
    ++taken_;
  }
}

void PageIndex::begin(std::uint32_t segment) {
  if (!segments_.try_emplace(segment).second) throw Error(Code::invalid, "segment numbers are used once");
}

void PageIndex::insert(std::string_view digest, const Page& page) {
  check_digest(digest);
  if (!segments_.contains(page.segment)) throw Error(Code::invalid, "the segment of a page has not begun");
  if (4 * (taken_ + 1) > 3 * slots_.size()) lay();
  std::size_t at = home(digest.data());
  while (slots_[at].taken && std::memcmp(slots_[at].digest, digest.data(), kDigest) != 0) at = after(at);
  Slot& slot = slots_[at];
  const bool moves = slot.taken && segments_.contains(slot.segment);
  if (moves) count(slot.segment, slot.salt, -1, -static_cast<std::int64_t>(slot.bytes));
  taken_ += !slot.taken;
  std::memcpy(slot.digest, digest.data(), kDigest);
  slot.hits = page.hits;
  slot.segment = page.segment;
  slot.unit = page.unit;
  slot.bytes = page.bytes;
  slot.crc = page.crc;
  slot.salt = page.salt;
  slot.position = page.position;
  slot.taken = true;
  count(page.segment, page.salt, 1, page.bytes);
}

std::optional<Page> PageIndex::find(std::string_view digest) const {
  const Slot* const slot = probe(digest);
  if (slot == nullptr) return std::nullopt;
  return Page{slot->segment, slot->unit, slot->bytes, slot->crc, slot->salt, slot->position, slot->hits};
}

void PageIndex::hit(std::string_view digest) {
  Slot* const slot = const_cast<Slot*>(probe(digest));
  if (slot != nullptr && slot->hits < 255) ++slot->hits;
}

void PageIndex::remove(std::string_view digest, std::uint32_t segment) {
  Slot* const slot = const_cast<Slot*>(probe(digest));
  if (slot == nullptr || slot->segment != segment) return;
  count(segment, slot->salt, -1, -static_cast<std::int64_t>(slot->bytes));
  // Closes the gap: a later slot of the same run moves up unless its home lies behind the gap.
  std::size_t gap = static_cast<std::size_t>(slot - slots_.data());
  slots_[gap].taken = false;
  --taken_;
  for (std::size_t at = after(gap); slots_[at].taken; at = after(at)) {
    const std::size_t wanted = home(slots_[at].digest);
    const bool stays = gap < at ? gap < wanted && wanted <= at : gap < wanted || wanted <= at;
    if (stays) continue;
    slots_[gap] = slots_[at];
    slots_[at].taken = false;
    gap = at;
  }
}

void PageIndex::forget(std::uint32_t segment) {
  const auto place = segments_.find(segment);
  if (place == segments_.end()) return;
  pages_ -= place->second.pages;
  for (const auto& [salt, bytes] : place->second.usage)
    if ((usage_[salt] -= bytes) == 0) usage_.erase(salt);
  segments_.erase(place);
}

std::uint64_t PageIndex::bytes_of(std::uint32_t salt) const {
  const auto place = usage_.find(salt);
  return place == usage_.end() ? 0 : place->second;
}

}  // namespace ff::kv
