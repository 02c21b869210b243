// Vectors of the instruction set that this unit is compiled for, and the few steps that need its instructions.
// Everything else is written once on these types. Included by kernels.inl, inside no namespace.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace ff::simd {
namespace {

#if defined(__AVX512BW__)
constexpr std::size_t kWidth = 64;
#elif defined(__AVX2__)
constexpr std::size_t kWidth = 32;
#else
constexpr std::size_t kWidth = 16;
#endif

template <class T, std::size_t bytes = kWidth>
struct VectorOf {
  typedef T type __attribute__((vector_size(bytes)));
};
template <class T, std::size_t bytes = kWidth>
using Vector = typename VectorOf<T, bytes>::type;

using F32 = Vector<float>;
using F64 = Vector<double>;
using I32 = Vector<std::int32_t>;
using U32 = Vector<std::uint32_t>;
using U16 = Vector<std::uint16_t>;
using U8 = Vector<std::uint8_t>;
using Half16 = Vector<std::uint16_t, kWidth / 2>;   // as many 16-bit lanes as F32 has
using Half8 = Vector<std::uint8_t, kWidth / 2>;     // as many 8-bit lanes as U16 has
using Quarter8s = Vector<std::int8_t, kWidth / 4>;  // as many signed 8-bit lanes as F32 has
constexpr std::size_t kLanes = sizeof(F32) / sizeof(float);

template <class V>
inline V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <class V>
inline void store(void* p, V v) {
  std::memcpy(p, &v, sizeof v);
}

// Returns the same bits as another vector type of the same size.
template <class To, class From>
inline To as(From v) {
  static_assert(sizeof(To) == sizeof(From));
  return (To)v;
}

template <class V, class T>
inline V splat(T value) {
  return V{} + value;
}

inline F32 absolute(F32 v) { return as<F32>(as<U32>(v) & 0x7FFFFFFFu); }
inline F32 with_sign_of(F32 magnitude, F32 v) { return as<F32>(as<U32>(magnitude) | (as<U32>(v) & 0x80000000u)); }

// Returns a * b + c, rounded once.
inline F32 fused(F32 a, F32 b, F32 c) {
#if defined(__AVX512BW__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#else
  for (std::size_t lane = 0; lane < kLanes; ++lane) c[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
  return c;
#endif
}

// Rounds to the nearest integer, ties to even. Returns the smallest integer for NaN and for values out of range.
inline I32 to_integer(F32 v) {
#if defined(__AVX512BW__)
  return as<I32>(_mm512_maskz_cvtps_epi32(0xFFFF, v));
#elif defined(__AVX2__)
  return as<I32>(_mm256_cvtps_epi32(v));
#else
  return as<I32>(_mm_cvtps_epi32(v));
#endif
}

inline Half16 low_half(U16 v) { return load<Half16>(&v); }
inline Half16 high_half(U16 v) { return load<Half16>(reinterpret_cast<const char*>(&v) + sizeof(Half16)); }

#if defined(__AVX512BW__)

// The zero-masked forms with all lanes on: the plain ones make GCC 12 warn of an uninitialized value.
constexpr __mmask16 kAll = 0xFFFF;

// Widens each lane.
inline U32 wide(Half16 v) { return as<U32>(_mm512_maskz_cvtepu16_epi32(kAll, as<__m256i>(v))); }
inline U16 wide(Half8 v) { return as<U16>(_mm512_maskz_cvtepu8_epi16(~0u, as<__m256i>(v))); }
inline I32 wide(Quarter8s v) { return as<I32>(_mm512_maskz_cvtepi8_epi32(kAll, as<__m128i>(v))); }

inline bool any_nan(F32 a, F32 b, F32 c, F32 d) {
  return !_mm512_kortestz(_mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q), _mm512_cmp_ps_mask(c, d, _CMP_UNORD_Q));
}
inline bool any_nan(F64 a, F64 b, F64 c, F64 d) {
  return !_mm512_kortestz(_mm512_cmp_pd_mask(a, b, _CMP_UNORD_Q), _mm512_cmp_pd_mask(c, d, _CMP_UNORD_Q));
}
inline U16 join(Half16 low, Half16 high) {
  return as<U16>(_mm512_maskz_inserti64x4(0xFF, _mm512_castsi256_si512(as<__m256i>(low)), as<__m256i>(high), 1));
}
// Returns the low halves of the lanes of both vectors, in order. REQUIRES: each value fits.
inline U16 pack(U32 low, U32 high) {
  return join(as<Half16>(_mm512_maskz_cvtepi32_epi16(kAll, as<__m512i>(low))),
              as<Half16>(_mm512_maskz_cvtepi32_epi16(kAll, as<__m512i>(high))));
}
inline U8 pack(U16 low, U16 high) {
  return as<U8>(join(as<Half16>(_mm512_maskz_cvtepi16_epi8(~0u, as<__m512i>(low))),
                     as<Half16>(_mm512_maskz_cvtepi16_epi8(~0u, as<__m512i>(high)))));
}
inline F32 half_to_float(Half16 v) { return _mm512_maskz_cvtph_ps(kAll, as<__m256i>(v)); }
inline Half16 float_to_half(F32 v) {
  return as<Half16>(_mm512_maskz_cvtps_ph(kAll, v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#elif defined(__AVX2__)

// Widens each lane.
inline U32 wide(Half16 v) { return as<U32>(_mm256_cvtepu16_epi32(as<__m128i>(v))); }
inline U16 wide(Half8 v) { return as<U16>(_mm256_cvtepu8_epi16(as<__m128i>(v))); }
inline I32 wide(Quarter8s v) { return as<I32>(_mm256_cvtepi8_epi32(_mm_set_epi64x(0, load<std::int64_t>(&v)))); }

inline bool any_nan(F32 a, F32 b, F32 c, F32 d) {
  return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(a, b, _CMP_UNORD_Q), _mm256_cmp_ps(c, d, _CMP_UNORD_Q))) != 0;
}
inline bool any_nan(F64 a, F64 b, F64 c, F64 d) {
  return _mm256_movemask_pd(_mm256_or_pd(_mm256_cmp_pd(a, b, _CMP_UNORD_Q), _mm256_cmp_pd(c, d, _CMP_UNORD_Q))) != 0;
}
inline U16 join(Half16 low, Half16 high) {
  return as<U16>(_mm256_inserti128_si256(_mm256_castsi128_si256(as<__m128i>(low)), as<__m128i>(high), 1));
}
// Returns the low halves of the lanes of both vectors, in order. REQUIRES: each value fits.
inline U16 pack(U32 low, U32 high) {
  const __m256i mixed = _mm256_packus_epi32(as<__m256i>(low), as<__m256i>(high));
  return as<U16>(_mm256_permute4x64_epi64(mixed, 0xD8));
}
inline U8 pack(U16 low, U16 high) {
  const __m256i mixed = _mm256_packus_epi16(as<__m256i>(low), as<__m256i>(high));
  return as<U8>(_mm256_permute4x64_epi64(mixed, 0xD8));
}
inline F32 half_to_float(Half16 v) { return _mm256_cvtph_ps(as<__m128i>(v)); }
inline Half16 float_to_half(F32 v) {
  return as<Half16>(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#else

// Widens each lane.
inline U32 wide(Half16 v) { return __builtin_convertvector(v, U32); }
inline U16 wide(Half8 v) { return __builtin_convertvector(v, U16); }
inline I32 wide(Quarter8s v) {
  using Half16s = Vector<std::int16_t, kWidth / 2>;  // GCC cannot convert from 8 to 32 bits in one step
  return __builtin_convertvector(__builtin_convertvector(v, Half16s), I32);
}

inline bool any_nan(F32 a, F32 b, F32 c, F32 d) {
  return _mm_movemask_ps(_mm_or_ps(_mm_cmpunord_ps(a, b), _mm_cmpunord_ps(c, d))) != 0;
}
inline bool any_nan(F64 a, F64 b, F64 c, F64 d) {
  return _mm_movemask_pd(_mm_or_pd(_mm_cmpunord_pd(a, b), _mm_cmpunord_pd(c, d))) != 0;
}
inline U16 join(Half16 low, Half16 high) {
  using U64 = Vector<std::uint64_t>;
  return as<U16>(U64{load<std::uint64_t>(&low), load<std::uint64_t>(&high)});
}
// Returns the low halves of the lanes of both vectors, in order. REQUIRES: each value fits. SSE2 packs with signed
// saturation, so the low halves are sign-extended first.
inline U16 pack(U32 low, U32 high) {
  return as<U16>(_mm_packs_epi32(as<__m128i>(as<I32>(low << 16) >> 16), as<__m128i>(as<I32>(high << 16) >> 16)));
}
inline U8 pack(U16 low, U16 high) { return as<U8>(_mm_packus_epi16(as<__m128i>(low), as<__m128i>(high))); }

// An f16 has 5 exponent bits of bias 15 and 10 mantissa bits. Shifted up by 13, its fields are where an f32 has its
// fields, and the exponent needs 112 more. A denormal's exponent needs 113 more; its implicit bit is then subtracted.
inline F32 half_to_float(Half16 v) {
  const U32 u = wide(v);
  const U32 field = (u & 0x7FFFu) << 13;
  const U32 normal = field + (112u << 23);
  const F32 denormal = as<F32>(field + (113u << 23)) - 0x1p-14f;
  const U32 special = field | 0x7F800000u;
  const U32 finite = as<I32>(field) < (1 << 23) ? as<U32>(denormal) : normal;
  const U32 magnitude = as<I32>(field) >= (31 << 23) ? special : finite;
  return as<F32>(magnitude | ((u & 0x8000u) << 16));
}
// REQUIRES: a NaN is quiet. Its payload is cut off as the processor's conversion does.
inline Half16 float_to_half(F32 v) {
  const U32 u = as<U32>(v);
  const U32 a = u & 0x7FFFFFFFu;
  const U32 rounded = (a + 0xFFFu + ((a >> 13) & 1u) - (112u << 23)) >> 13;
  const U32 normal = as<I32>(rounded) < 0x7C00 ? rounded : splat<U32>(0x7C00u);
  // Added to 0.5, a value below the normal numbers is rounded at 2^-24, the step of f16 there.
  const U32 denormal = as<U32>(as<F32>(a) + 0.5f) - 0x3F000000u;
  const U32 finite = as<I32>(a) < (113 << 23) ? denormal : normal;
  const U32 nan = 0x7C00u | ((a >> 13) & 0x3FFu);
  const U32 magnitude = as<I32>(a) > 0x7F800000 ? nan : finite;
  const U32 h = magnitude | ((u >> 16) & 0x8000u);
  return low_half(pack(h, h));
}

#endif

}  // namespace
}  // namespace ff::simd
