// Random bits that depend on a seed and an element's number. Kernels of all instruction sets draw the same bits.
#pragma once

#include "simd/lanes.inl"

namespace ff::simd {
namespace {

// Random bits of element first + i: a hash of its number with two keys drawn from the seed.
class Noise {
 public:
  Noise(std::uint64_t seed, std::uint64_t first) : seed_(seed), next_(first) {
    for (std::size_t j = 0; j < kLanes; ++j) lanes_[j] = static_cast<std::uint32_t>(j);
    draw_keys();
  }

  // Returns 32 bits for each of the next kLanes elements. REQUIRES: `first` was a multiple of kLanes.
  U32 next() {
    U32 h = (lanes_ + static_cast<std::uint32_t>(next_)) ^ key_[0];
    h = (h ^ (h >> 16)) * 0x7FEB352Du;
    h = (h ^ (h >> 15) ^ key_[1]) * 0x846CA68Bu;
    next_ += kLanes;
    if (static_cast<std::uint32_t>(next_) == 0) draw_keys();
    return h ^ (h >> 16);
  }

 private:
  // Called once for 2^32 elements.
  void draw_keys() {
    std::uint64_t k = seed_ + (next_ >> 32) * 0x9E3779B97F4A7C15u;
    k = (k ^ (k >> 30)) * 0xBF58476D1CE4E5B9u;
    k = (k ^ (k >> 27)) * 0x94D049BB133111EBu;
    k ^= k >> 31;
    key_[0] = static_cast<std::uint32_t>(k);
    key_[1] = static_cast<std::uint32_t>(k >> 32);
  }

  std::uint64_t seed_, next_;
  std::uint32_t key_[2] = {};
  U32 lanes_ = {};
};

}  // namespace
}  // namespace ff::simd
