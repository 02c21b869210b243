#include "hfreduce/p2p/shared_offers.hpp"

#include <unistd.h>

#include "base/error.hpp"

namespace ff::hfreduce::mail {
namespace {

constexpr std::size_t kSegments = 4096;  // maximum mapped segments of a peer; bytes in other segments use the socket
constexpr std::uint64_t kClaimed = 1, kWithdrawn = 2;

bool settle(Claim& claim, std::uint64_t id, std::uint64_t state) {
  std::uint64_t offered = id << 2;
  return claim.compare_exchange_strong(offered, (id << 2) + state);
}

// Maps a peer's descriptor; returns none if the mapping fails.
std::optional<Segment> attach(int fd) {
  try {
    return Segment::attach(fd);
  } catch (const Error&) {
    return std::nullopt;
  }
}

}  // namespace

std::optional<Offer> Offers::make(std::uint64_t id, const char* data, std::size_t bytes,
                                  std::vector<int>& descriptors) {
  const auto place = Arena::of_process().find(data, bytes);
  if (!place) return std::nullopt;
  if (!claims_) {
    try {
      claims_ = Segment::create("fireflyer-claims", kSlots * sizeof(Claim));
    } catch (const Error&) {
      return std::nullopt;  // no memory: use the socket
    }
    for (std::uint32_t slot = kSlots; slot-- > 0;) free_.push_back(slot);
  }
  if (free_.empty()) return std::nullopt;
  Offer offer;
  offer.segment = place->segment;
  offer.offset = place->offset;
  offer.slot = free_.back();
  free_.pop_back();
  claim(offer.slot) = id << 2;
  if (!claims_sent_) {
    descriptors.push_back(claims_->fd());
    offer.with_claims = 1;
    claims_sent_ = true;
  }
  const auto number = static_cast<std::size_t>(place->segment);
  if (segments_sent_.size() <= number) segments_sent_.resize(number + 1);
  if (!segments_sent_[number]) {
    descriptors.push_back(Arena::of_process().descriptor(place->segment));
    offer.with_segment = 1;
    segments_sent_[number] = true;
  }
  return offer;
}

bool Offers::withdraw(std::uint64_t id, std::uint32_t slot) { return settle(claim(slot), id, kWithdrawn); }

void Offers::retract(const Offer& offer) {
  if (offer.with_claims != 0) claims_sent_ = false;
  if (offer.with_segment != 0) segments_sent_[static_cast<std::size_t>(offer.segment)] = false;
}

std::size_t Offered::descriptors(const Offer& offer) {
  return (offer.with_claims != 0 ? 1U : 0U) + (offer.with_segment != 0 ? 1U : 0U);
}

void Offered::map(const Offer& offer, const std::vector<int>& descriptors) {
  std::size_t next = 0;
  if (offer.with_claims != 0) {
    auto claims = attach(descriptors[next++]);
    if (!claims_ && claims && claims->size() >= kSlots * sizeof(Claim)) claims_ = std::move(claims);
  }
  if (offer.with_segment != 0) {
    auto segment = attach(descriptors[next]);
    if (segment && segments_.size() < kSegments) {
      segments_.emplace(offer.segment, std::move(*segment));  // never replaced, because copies may be in progress
    }
  }
}

const char* Offered::find(const Offer& offer, std::size_t bytes) const {
  const auto at = segments_.find(offer.segment);
  if (!claims_ || offer.slot >= kSlots || at == segments_.end()) return nullptr;
  const std::size_t size = at->second.size();
  if (offer.offset > size || bytes > size - offer.offset) return nullptr;
  return at->second.data() + offer.offset;
}

bool Offered::claim(std::uint64_t id, const Offer& offer) {
  return settle(reinterpret_cast<Claim*>(claims_->data())[offer.slot], id, kClaimed);
}

}  // namespace ff::hfreduce::mail
