// Bytes for the C++ tests, filled in bulk: under the sanitizers a loop over bytes would cost more than the tested code.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace ff {

// Byte i is start + i * step, modulo 256.
inline void fill_steps(char* to, std::size_t bytes, std::size_t step, std::size_t start) {
  constexpr std::size_t kPeriod = 256;
  for (std::size_t i = 0; i < std::min(bytes, kPeriod); ++i) to[i] = static_cast<char>(start + i * step);
  for (std::size_t done = kPeriod; done < bytes; done += done) std::memcpy(to + done, to, std::min(done, bytes - done));
}

// Fills with splitmix64 of the seed; the result is the same on every platform.
inline void fill_random(void* to, std::size_t bytes, std::uint64_t seed) {
  for (std::size_t done = 0; done < bytes; done += sizeof seed) {
    std::uint64_t word = seed += 0x9E3779B97F4A7C15;
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB;
    word ^= word >> 31;
    std::memcpy(static_cast<char*>(to) + done, &word, std::min(bytes - done, sizeof word));
  }
}

// Returns whether all bytes have this value.
inline bool all_are(const char* at, std::size_t bytes, char value) {
  return bytes == 0 || (*at == value && std::memcmp(at, at + 1, bytes - 1) == 0);
}

}  // namespace ff
