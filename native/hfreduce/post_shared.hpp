// Messages that need not cross the socket: sender and receiver are on one host and the bytes lie in
// the sender's arena.
//
//   sender                                                receiver
//     | offer {tag, id, bytes} Offer, new descriptors -->| meets its receive, copies from the mapped segment,
//     |<-------------------------------------- done {id} | claims
//
// The receiver claims a message after it has copied it, the sender withdraws one before it gives
// its bytes back early: both swap one word in shared memory, and who comes first is right. So a
// receive never succeeds with bytes that changed under the copy, and a sender need not wait for a
// receiver that is frozen.
//
// Thread contract: none of its own; Post's lock guards everything here.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "base/segment.hpp"
#include "hfreduce/arena.hpp"

namespace ff::hfreduce::mail {

// Follows the header of an offer.
struct Offer {
  std::int32_t segment = -1;  // of the sender's arena
  std::uint32_t slot = 0;     // of the sender's claims
  std::uint64_t offset = 0;
  std::uint32_t with_claims = 0, with_segment = 0;  // do their descriptors come with this frame?
};
static_assert(sizeof(Offer) == 24);

inline constexpr std::size_t kSlots = 256;  // messages on offer on one link; more go through the socket

// A word a slot, swapped once by each side: (id << 2) + state. Ids of a link never come again, so a
// slot may.
using Claim = std::atomic<std::uint64_t>;
static_assert(sizeof(Claim) == 8 && Claim::is_always_lock_free);

// The sender's side of one link.
class Offers {
 public:
  // What to send for these bytes, unless they lie elsewhere or all slots are taken; `descriptors`
  // get what the peer does not have yet, in the order in which it expects them.
  std::optional<Offer> make(std::uint64_t id, const char* data, std::size_t bytes,
                            std::vector<int>& descriptors);
  bool withdraw(std::uint64_t id, std::uint32_t slot);  // false: the receiver has claimed it
  void free(std::uint32_t slot) { free_.push_back(slot); }
  void unsay(const Offer& offer);  // it was never sent, nor were its descriptors

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
  static std::size_t descriptors(const Offer& offer);  // how many come with it
  // REQUIRES: that many; owned from here on.
  void map(const Offer& offer, const std::vector<int>& descriptors);
  // Where the bytes lie, for as long as this lives; nullptr: not in memory that could be mapped.
  const char* find(const Offer& offer, std::size_t bytes) const;
  bool claim(std::uint64_t id, const Offer& offer);  // false: withdrawn, the copy is worthless

 private:
  std::optional<Segment> claims_;
  std::map<std::int32_t, Segment> segments_;
};

}  // namespace ff::hfreduce::mail
