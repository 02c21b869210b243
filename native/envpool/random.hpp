// A stream of random numbers of one environment. Streams of different seeds and environments do not overlap in
// practice, and none depends on another, so results do not depend on the threads.
#pragma once

#include <cstdint>

namespace ff::envpool {

class Random {
 public:
  explicit Random(std::uint64_t seed = 0) : state_(seed) { static_cast<void>(next()); }

  // Uniform in [low, high).
  double uniform(double low, double high) {
    constexpr double kUnit = 1.0 / 9007199254740992.0;  // 2^-53
    return low + (high - low) * static_cast<double>(next() >> 11) * kUnit;
  }

 private:
  std::uint64_t next() {  // SplitMix64 (Steele, Lea, Flood 2014)
    state_ += 0x9e3779b97f4a7c15;
    std::uint64_t mixed = state_;
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111eb;
    return mixed ^ (mixed >> 31);
  }

  std::uint64_t state_;
};

}  // namespace ff::envpool
