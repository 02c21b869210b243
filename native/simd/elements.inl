// Element types in memory. Each says how kVectors accumulators are read from storage and rounded back to it:
//   size           bytes of an element
//   Vec            accumulators, kVectors of them a step; `step` elements in all
//   read(p, v)     step elements at p, widened
//   round(v, raw)  the same elements in storage form, kRaw vectors. REQUIRES: a NaN in v is `quiet`.
// The order of lanes in the accumulators is the type's own affair unless `natural`: only natural types meet another
// type in one kernel.
#pragma once

#include "simd/lanes.inl"

namespace ff::simd {
namespace {

constexpr std::size_t kVectors = 4;

// Integers, and f32 and f64: storage is the accumulator.
template <class T>
struct Plain {
  using Scalar = T;
  using Vec = Vector<T>;
  using Raw = Vec;
  static constexpr std::size_t size = sizeof(T), step = kVectors * kWidth / size, kRaw = kVectors;
  static constexpr bool floating = false;
  static void read(const char* p, Vec (&v)[kVectors]) {
    for (std::size_t j = 0; j < kVectors; ++j) v[j] = load<Vec>(p + j * kWidth);
  }
  static void round(const Vec (&v)[kVectors], Vec (&raw)[kVectors]) {
    for (std::size_t j = 0; j < kVectors; ++j) raw[j] = v[j];
  }
};

struct Float32 : Plain<float> {
  static constexpr bool floating = true;
  static F32 quiet() { return as<F32>(splat<U32>(0x7FC00000u)); }
};

struct Float64 : Plain<double> {
  static constexpr bool floating = true;
  static F64 quiet() { return as<F64>(splat<Vector<std::uint64_t>>(0x7FF8000000000000u)); }
};

// Bytes that are 0 or 1; in storage any nonzero byte is 1.
struct Bool : Plain<std::uint8_t> {
  static void read(const char* p, U8 (&v)[kVectors]) {
    for (std::size_t j = 0; j < kVectors; ++j) {
      v[j] = as<U8>(load<U8>(p + j * kWidth) != 0) & 1;
    }
  }
};

// What all types that accumulate in f32 share.
template <class Storage>
struct Short {
  using Scalar = float;
  using Vec = F32;
  using Raw = Vector<Storage>;
  static constexpr std::size_t size = sizeof(Storage), step = kVectors * kLanes,
                               kRaw = step * size / kWidth;
  static constexpr bool floating = true;
  static F32 quiet() { return Float32::quiet(); }
};

// bf16 is the upper half of an f32. Lanes are not natural: v[2j] has the even and v[2j + 1] the odd elements, so that a
// shift and a mask take them apart and nothing crosses lanes.
struct BFloat16 : Short<std::uint16_t> {
  static void read(const char* p, F32 (&v)[kVectors]) {
    for (std::size_t j = 0; j < kRaw; ++j) {
      const U32 pair = load<U32>(p + j * kWidth);
      v[2 * j] = as<F32>(pair << 16);
      v[2 * j + 1] = as<F32>(pair & 0xFFFF0000u);
    }
  }
  // To nearest even on 16-bit lanes: up if the lower half exceeds 0x8000, or is just that and the upper half odd.
  static void round(const F32 (&v)[kVectors], U16 (&raw)[kRaw]) {
    for (std::size_t j = 0; j < kRaw; ++j) {
      const U32 even = as<U32>(v[2 * j]), odd = as<U32>(v[2 * j + 1]);
      const U16 upper = as<U16>((even >> 16) | (odd & 0xFFFF0000u));
      const U16 lower = as<U16>((even & 0xFFFFu) | (odd << 16));
      const U16 beyond = lower | (upper & 1);
      raw[j] = beyond > 0x8000 ? upper + 1 : upper;
    }
  }
};

// The same with natural lanes.
struct NaturalBFloat16 : Short<std::uint16_t> {
  static void read(const char* p, F32 (&v)[kVectors]) {
    for (std::size_t j = 0; j < kVectors; ++j) {
      v[j] = as<F32>(wide(load<Half16>(p + j * sizeof(Half16))) << 16);
    }
  }
  static U32 rounded(F32 v) {
    const U32 u = as<U32>(v);
    return (u + (((u >> 16) & 1u) + 0x7FFFu)) >> 16;
  }
  static void round(const F32 (&v)[kVectors], U16 (&raw)[kRaw]) {
    for (std::size_t j = 0; j < kRaw; ++j) {
      raw[j] = pack(rounded(v[2 * j]), rounded(v[2 * j + 1]));
    }
  }
};

struct Float16 : Short<std::uint16_t> {
  static void read(const char* p, F32 (&v)[kVectors]) {
    for (std::size_t j = 0; j < kVectors; ++j) {
      v[j] = half_to_float(load<Half16>(p + j * sizeof(Half16)));
    }
  }
  static void round(const F32 (&v)[kVectors], U16 (&raw)[kRaw]) {
    for (std::size_t j = 0; j < kRaw; ++j) {
      raw[j] = join(float_to_half(v[2 * j]), float_to_half(v[2 * j + 1]));
    }
  }
};

// f32 rounded to `mantissa` bits below the leading one, but no finer than the step of the smallest normal number,
// 2^least. Adding the power of two whose last bit is the step rounds the sum there, to nearest even.
// REQUIRES: a >= 0, and a < 2^100 or NaN.
template <int mantissa, int least>
inline F32 round_mantissa(F32 a) {
  const I32 exponent = as<I32>(a) & 0x7F800000;
  const I32 smallest = splat<I32>((127 + least) << 23);
  const F32 anchor =
      as<F32>((exponent > smallest ? exponent : smallest) + ((23 - mantissa) << 23));
  return (a + anchor) - anchor;
}

// e4m3fn: 4 exponent bits of bias 7, 3 mantissa bits, no infinity, NaN is S.1111.111. With an exponent bit put above
// it is an f16 of 2^-8 times the value.
struct Float8E4M3 : Short<std::uint8_t> {
  static void read(const char* p, F32 (&v)[kVectors]) {
    for (std::size_t j = 0; j < kVectors; ++j) {
      const Half16 b = wide(load<Quarter8>(p + j * sizeof(Quarter8)));
      const F32 value = half_to_float(((b & 0x80) << 8) | ((b & 0x7F) << 7)) * 0x1p8f;
      v[j] = absolute(value) == 480.0f ? quiet() : value;
    }
  }
  static Half16 rounded(F32 v) {
    const F32 a = absolute(v);
    const F32 limited = a < 480.0f ? a : splat<F32>(480.0f);  // NaN too: 480 has the bits of NaN
    return float_to_half(with_sign_of(round_mantissa<3, -6>(limited) * 0x1p-8f, v));
  }
  static void round(const F32 (&v)[kVectors], U8 (&raw)[kRaw]) {
    const U16 low = join(rounded(v[0]), rounded(v[1])), high = join(rounded(v[2]), rounded(v[3]));
    raw[0] = pack(bytes(low), bytes(high));
  }
  static U16 bytes(U16 h) { return ((h >> 8) & 0x80) | ((h >> 7) & 0x7F); }
};

// e5m2: the upper half of an f16.
struct Float8E5M2 : Short<std::uint8_t> {
  static void read(const char* p, F32 (&v)[kVectors]) {
    for (std::size_t j = 0; j < kVectors; ++j) {
      v[j] = half_to_float(wide(load<Quarter8>(p + j * sizeof(Quarter8))) << 8);
    }
  }
  static Half16 rounded(F32 v) {
    const F32 a = absolute(v);
    const F32 limited = a > 65536.0f ? splat<F32>(65536.0f) : a;  // 65536 becomes infinity, NaN stays
    return float_to_half(with_sign_of(round_mantissa<2, -14>(limited), v));
  }
  static void round(const F32 (&v)[kVectors], U8 (&raw)[kRaw]) {
    const U16 low = join(rounded(v[0]), rounded(v[1])), high = join(rounded(v[2]), rounded(v[3]));
    const U8 b = pack(low >> 8, high >> 8);
    raw[0] = (b & 0x7F) > 0x7C ? splat<U8>(std::uint8_t{0x7F}) : b;
  }
};

}  // namespace
}  // namespace ff::simd
