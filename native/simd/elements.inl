// Element types in memory. Each type defines how kVectors accumulators are read from storage and rounded back to it:
//   size           bytes of an element
//   Vec            accumulators, kVectors of them a step; `step` elements in all
//   read(p, v)     step elements at p, widened
//   round(v, raw)  the same elements in storage form, kRaw vectors. REQUIRES: a NaN in v is `quiet`.
// A type that is not `natural` may order the lanes of its accumulators in its own way. Only natural types are combined
// with another type in one kernel.
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

// Base of all types that accumulate in f32.
template <class Storage>
struct Short {
  using Scalar = float;
  using Vec = F32;
  using Raw = Vector<Storage>;
  static constexpr std::size_t size = sizeof(Storage), step = kVectors * kLanes, kRaw = step * size / kWidth;
  static constexpr bool floating = true;
  static F32 quiet() { return Float32::quiet(); }
};

// bf16 is the upper half of an f32. Rounds to nearest even: adds to the lower half 0x7FFF where the upper half is even,
// 0x8000 where it is odd, and keeps the carry.
inline U32 round_upper_half(F32 v) {
  const U32 u = as<U32>(v);
  return u + (((u >> 16) & 1u) + 0x7FFFu);
}

// Lanes are not natural: v[2j] has the even and v[2j + 1] the odd elements, so that a shift and a mask take them
// apart and nothing crosses lanes.
struct BFloat16 : Short<std::uint16_t> {
  static void read(const char* p, F32 (&v)[kVectors]) {
    for (std::size_t j = 0; j < kRaw; ++j) {
      const U32 pair = load<U32>(p + j * kWidth);
      v[2 * j] = as<F32>(pair << 16);
      v[2 * j + 1] = as<F32>(pair & 0xFFFF0000u);
    }
  }
  static void round(const F32 (&v)[kVectors], U16 (&raw)[kRaw]) {
    for (std::size_t j = 0; j < kRaw; ++j) raw[j] = round(v[2 * j], v[2 * j + 1]);
  }
  static U16 round(F32 even, F32 odd) {
    if constexpr (kWidth < 64) {
      return as<U16>((round_upper_half(even) >> 16) | (round_upper_half(odd) & 0xFFFF0000u));
    }
    // With mask registers, 16-bit lanes take fewer instructions. Rounds up if the lower half exceeds 0x8000, or equals
    // 0x8000 and the upper half is odd.
    const U16 upper = as<U16>((as<U32>(even) >> 16) | (as<U32>(odd) & 0xFFFF0000u));
    const U16 lower = as<U16>((as<U32>(even) & 0xFFFFu) | (as<U32>(odd) << 16));
    return (lower | (upper & 1)) > 0x8000 ? upper + 1 : upper;
  }
};

// bf16 with natural lanes.
struct NaturalBFloat16 : Short<std::uint16_t> {
  static void read(const char* p, F32 (&v)[kVectors]) {
    for (std::size_t j = 0; j < kVectors; ++j) {
      v[j] = as<F32>(wide(load<Half16>(p + j * sizeof(Half16))) << 16);
    }
  }
  static void round(const F32 (&v)[kVectors], U16 (&raw)[kRaw]) {
    for (std::size_t j = 0; j < kRaw; ++j) {
      raw[j] = pack(round_upper_half(v[2 * j]) >> 16, round_upper_half(v[2 * j + 1]) >> 16);
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

// Rounds an f32 to `mantissa` bits below the leading bit, but no finer than the step of the smallest normal number,
// 2^least. Adding a power of two whose last bit is that step rounds the sum to the step, to nearest even.
// REQUIRES: a >= 0, and a < 2^100 or NaN.
template <int mantissa, int least>
inline F32 round_mantissa(F32 a) {
  const I32 exponent = as<I32>(a) & 0x7F800000;
  const I32 smallest = splat<I32>((127 + least) << 23);
  const U32 coarser = as<U32>(exponent > smallest ? exponent : smallest);
  const F32 anchor = as<F32>(coarser + (std::uint32_t{23 - mantissa} << 23));
  return (a + anchor) - anchor;
}

// Base of both f8 types. Conversions between storage and f32 go through f16 on 16-bit lanes: Type::halves converts
// bytes in the low halves of lanes to f16, and Type::codes converts f16 to such bytes.
template <class Type>
struct Float8 : Short<std::uint8_t> {
  static void read(const char* p, F32 (&v)[kVectors]) {
    for (std::size_t j = 0; j < kVectors; j += 2) {
      const U16 h = Type::halves(wide(load<Half8>(p + j * kLanes)));
      v[j] = half_to_float(low_half(h)) * Type::kUnit;
      v[j + 1] = half_to_float(high_half(h)) * Type::kUnit;
    }
  }
  static void round(const F32 (&v)[kVectors], U8 (&raw)[kRaw]) {
    Half16 h[kVectors];
    for (std::size_t j = 0; j < kVectors; ++j) {
      const F32 a = absolute(v[j]);
      const F32 limited = a > Type::kLimit ? splat<F32>(Type::kLimit) : a;  // NaN stays
      const F32 rounded = round_mantissa<Type::kMantissa, Type::kLeast>(limited);
      h[j] = float_to_half(with_sign_of(rounded * (1 / Type::kUnit), v[j]));
    }
    raw[0] = pack(Type::codes(join(h[0], h[1])), Type::codes(join(h[2], h[3])));
  }
};

// e4m3fn: 4 exponent bits of bias 7, 3 mantissa bits, no infinity, NaN is S.1111.111. With one exponent bit more it
// is an f16 of 2^-8 times the value. Values beyond 448, also infinity, become 448, as PyTorch 2.13 converts them.
struct Float8E4M3 : Float8<Float8E4M3> {
  static constexpr float kUnit = 0x1p8f, kLimit = 448;
  static constexpr int kMantissa = 3, kLeast = -6;
  static U16 halves(U16 b) {
    const U16 h = ((b << 7) & 0x3F80) | ((b << 8) & 0x8000);
    return (h & 0x3F80) == 0x3F80 ? splat<U16>(std::uint16_t{0x7E00}) : h;
  }
  static U16 codes(U16 h) {
    const U16 magnitude = (h >> 7) & 0xFF;
    return (magnitude < 0x7F ? magnitude : splat<U16>(std::uint16_t{0x7F})) | ((h >> 8) & 0x80);
  }
};

// e5m2: the upper half of an f16. 65536 represents every value that overflows to infinity.
struct Float8E5M2 : Float8<Float8E5M2> {
  static constexpr float kUnit = 1, kLimit = 65536;
  static constexpr int kMantissa = 2, kLeast = -14;
  static U16 halves(U16 b) { return b << 8; }
  static U16 codes(U16 h) {
    const U16 magnitude = (h >> 8) & 0x7F;
    return magnitude > 0x7C ? splat<U16>(std::uint16_t{0x7F}) : (h >> 8);
  }
};

}  // namespace
}  // namespace ff::simd
