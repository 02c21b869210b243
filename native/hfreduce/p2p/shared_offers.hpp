// Messages that bypass the socket: sender and receiver are on one host and the bytes lie in the sender's arena.
//
//   sender                                                receiver
//     | offer {tag, id, bytes} Offer, new descriptors -->| matches a receive, copies from the mapped segment,
//     |<-------------------------------------- done {id} | claims
//
// The receiver claims a message after copying it. The sender withdraws a message before it releases the message's bytes
// early. Claim and withdrawal swap the same word in shared memory, and the first swap wins. So a receive never succeeds
// with bytes that changed during the copy, and a sender need not wait for a frozen receiver.
//
// Thread contract: not thread-safe; P2PEngine's lock guards everything here.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "base/memory/segment.hpp"
#include "hfreduce/engine/arena.hpp"

namespace ff::hfreduce::mail {

// Body of an `offer` frame; follows the header.
struct Offer {
  std::int32_t segment = -1;  // of the sender's arena
  std::uint32_t slot = 0;     // of the sender's claims
  std::uint64_t offset = 0;
  // 1: the descriptor of the claims, or of the segment, comes with this frame.
  std::uint32_t with_claims = 0, with_segment = 0;
};
static_assert(sizeof(Offer) == 24);

inline constexpr std::size_t kSlots = 256;  // messages offered at a time on one link; more go through the socket

// One word per slot, swapped once by each side: (id << 2) + state. Ids of a link never repeat; slots may.
using Claim = std::atomic<std::uint64_t>;
static_assert(sizeof(Claim) == 8 && Claim::is_always_lock_free);

// The sender's side of one link.
class Offers {
 public:
  // Returns an offer for these bytes; none if they lie outside the arena or all slots are taken. Appends to `descriptors`
  // the descriptors that the peer lacks, in the order in which the peer expects them.
  std::optional<Offer> make(std::uint64_t id, const char* data, std::size_t bytes, std::vector<int>& descriptors);
  bool withdraw(std::uint64_t id, std::uint32_t slot);  // false: the receiver has claimed it
  void free(std::uint32_t slot) { free_.push_back(slot); }
  void retract(const Offer& offer);  // frees an offer. REQUIRES: neither the offer nor its descriptors were sent

 private:
  Claim& claim(std::uint32_t slot) { return reinterpret_cast<Claim*>(claims_->data())[slot]; }

  std::optional<Segment> claims_;
  std::vector<std::uint32_t> free_;
  bool claims_sent_ = false;
  std::vector<bool> segments_sent_;  // by number
};

// The receiver's side of one link.
class Offered {
 public:
  static std::size_t descriptors(const Offer& offer);  // number of descriptors that come with the offer
  // Maps the memory of the offer. Takes ownership of `descriptors`. REQUIRES: there are descriptors(offer) of them.
  void map(const Offer& offer, const std::vector<int>& descriptors);
  // Returns the address of the bytes, valid as long as this object lives; nullptr if the memory could not be mapped.
  const char* find(const Offer& offer, std::size_t bytes) const;
  bool claim(std::uint64_t id, const Offer& offer);  // false: withdrawn, so the copy is invalid

 private:
  std::optional<Segment> claims_;
  std::map<std::int32_t, Segment> segments_;
};

}  // namespace ff::hfreduce::mail
