// Kernels of the wire codecs, on tiles of f32 (kernels.hpp).
#pragma once

#include "simd/elements.inl"
#include "simd/noise.inl"

namespace ff::simd {
namespace {

// bf16 keeps the upper 16 bits. Random bits are added to the lower 16 bits: a carry rounds up, with a probability equal
// to the fraction that is cut off. The lower bits of infinity are 0, so it stays. NaN is not changed.
inline F32 dither_to_bf16(F32 x, U32 noise) {
  const U32 u = (as<U32>(x) + (noise >> 16)) & 0xFFFF0000u;
  return x == x ? as<F32>(u) : x;
}

// f16 drops 13 bits of a normal number. Below 2^-14 the step of f16 is that of 2^-14. So 2^-14 is added before the
// rounding, and subtracted after it.
inline F32 dither_to_f16(F32 x, U32 noise) {
  const F32 a = absolute(x);
  const F32 lift = a < 0x1p-14f ? splat<F32>(0x1p-14f) : F32{};
  const U32 u = (as<U32>(a + lift) + (noise >> 19)) & 0xFFFFE000u;
  return x == x ? with_sign_of(as<F32>(u) - lift, x) : x;
}

template <F32 (*round)(F32, U32)>
void dither(const float* x, std::size_t count, std::uint64_t seed, std::uint64_t first, float* y) {
  Noise noise(seed, first);
  for (std::size_t i = 0; i < count; i += kLanes) {
    store(y + i, round(load<F32>(x + i), noise.next()));
  }
}

// Returns the largest bit pattern of |x| in a block: that of the largest value, or of a NaN if there is one.
inline std::uint32_t largest(const float* x, std::size_t count) {
  I32 most = {};
  for (std::size_t i = 0; i < count; i += kLanes) {
    const I32 a = load<I32>(x + i) & 0x7FFFFFFF;
    most = a > most ? a : most;
  }
  std::int32_t result = 0;
  for (std::size_t j = 0; j < kLanes; ++j) result = most[j] > result ? most[j] : result;
  return static_cast<std::uint32_t>(result);
}

// Returns the scale of a block: absmax / 127, rounded so that 127 * scale is finite. Returns 0 if the scale would be
// below f32's normal numbers, NaN if absmax is not finite.
inline float scale_of(std::uint32_t absmax) {
  if (absmax >= 0x7F800000u) return __builtin_nanf("");
  const float scale = load<float>(&absmax) * 0x1.020408p-7f;
  return scale < 0x1p-126f ? 0.0f : scale;
}

// Adding 1.5 * 2^23 rounds to an integer, to nearest even, and leaves it in the low bits.
inline U32 nearest(F32 t) { return as<U32>(t + 0x1.8p23f) & 0xFFu; }

inline U32 dithered(F32 t, U32 noise) {
  const F32 low = t < -127.0f ? splat<F32>(-127.0f) : t;
  const F32 clamped = low > 127.0f ? splat<F32>(127.0f) : low;
  const F32 uniform = __builtin_convertvector(as<I32>(noise >> 16), F32) * 0x1p-16f;
  const I32 floor = __builtin_convertvector((clamped + 128.0f) + uniform, I32);
  return as<U32>(floor - 128) & 0xFFu;
}

void encode_int8(const float* x, std::size_t count, std::uint64_t seed, std::uint64_t first, char* wire) {
  Noise noise(seed, first);
  for (std::size_t i = 0; i < count; i += kInt8Block) {
    const std::size_t n = count - i < kInt8Block ? count - i : kInt8Block;
    const float scale = scale_of(largest(x + i, n));
    const float inverse = scale > 0 ? 1 / scale : 0.0f;
    store(wire, scale);
    wire += sizeof scale;
    for (std::size_t j = 0; j < n; j += kWidth) {
      U32 q[kVectors];
      for (std::size_t k = 0; k < kVectors; ++k) {
        const F32 v = load<F32>(x + i + j + k * kLanes);
        const F32 t = (scale > 0 ? v : F32{}) * inverse;  // infinity times an `inverse` of 0 would be NaN
        q[k] = seed == 0 ? nearest(t) : dithered(t, noise.next());
      }
      const U8 bytes = pack(pack(q[0], q[1]), pack(q[2], q[3]));
      std::memcpy(wire + j, &bytes, n - j < kWidth ? n - j : kWidth);
    }
    wire += n;
  }
}

void decode_int8(const char* wire, std::size_t count, float* y) {
  for (std::size_t i = 0; i < count; i += kInt8Block) {
    const std::size_t n = count - i < kInt8Block ? count - i : kInt8Block;
    const float scale = load<float>(wire);
    wire += sizeof scale;
    char rest[kInt8Block] = {};
    const char* q = wire;
    if (n < kInt8Block) q = static_cast<const char*>(std::memcpy(rest, wire, n));
    for (std::size_t j = 0; j < n; j += kLanes) {
      store(y + i + j, __builtin_convertvector(wide(load<Quarter8s>(q + j)), F32) * scale);
    }
    wire += n;
  }
}

void subtract(const float* x, const float* y, std::size_t count, float* residual) {
  const auto difference = [&](std::size_t i) {
    const F32 d = load<F32>(x + i) - load<F32>(y + i);
    return absolute(d) < __builtin_inff() ? d : F32{};
  };
  std::size_t i = 0;
  for (; count - i >= kLanes; i += kLanes) store(residual + i, difference(i));
  const F32 last = i < count ? difference(i) : F32{};
  std::memcpy(residual + i, &last, (count - i) * sizeof(float));
}

}  // namespace
}  // namespace ff::simd
