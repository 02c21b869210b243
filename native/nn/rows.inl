// Reads, rounds and writes steps of elements, also a last step with fewer elements. Included by kernels.inl.
#pragma once

#include "simd/elements.inl"

namespace ff::nn {
namespace {

using simd::kVectors;

inline bool has_nan(const simd::F32 (&v)[kVectors]) { return simd::any_nan(v[0], v[1], v[2], v[3]); }

// Rounds a step to storage form.
template <class T>
inline __attribute__((always_inline)) void round_step(typename T::Vec (&v)[kVectors], typename T::Raw (&raw)[T::kRaw]) {
  if constexpr (T::size == 2) {
    if (__builtin_expect(has_nan(v), 0)) {
      for (auto& part : v) part = part == part ? part : T::quiet();
    }
  }
  T::round(v, raw);
}

// Rounds a step to the type, and widens it again.
template <class T>
inline __attribute__((always_inline)) void settle(typename T::Vec (&v)[kVectors]) {
  if constexpr (T::size == 2) {
    typename T::Raw raw[T::kRaw];
    round_step<T>(v, raw);
    T::read(reinterpret_cast<const char*>(raw), v);
  }
}

// Reads the first `n` elements of a step; sets the other elements to 0.
template <class T>
inline __attribute__((always_inline)) void read(const char* p, std::size_t n, typename T::Vec (&v)[kVectors]) {
  if (__builtin_expect(n >= T::step, 1)) return T::read(p, v);
  char buffer[T::step * T::size] = {};
  std::memcpy(buffer, p, n * T::size);
  T::read(buffer, v);
}

// Rounds a step and writes its first `n` elements.
template <class T>
inline __attribute__((always_inline)) void write(char* p, std::size_t n, typename T::Vec (&v)[kVectors]) {
  typename T::Raw raw[T::kRaw];
  round_step<T>(v, raw);
  if (__builtin_expect(n < T::step, 0)) {
    std::memcpy(p, raw, n * T::size);
    return;
  }
  for (std::size_t j = 0; j < T::kRaw; ++j) simd::store(p + j * simd::kWidth, raw[j]);
}

}  // namespace
}  // namespace ff::nn
