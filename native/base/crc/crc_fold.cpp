#include "base/crc/crc_fold.hpp"

#include <immintrin.h>

namespace ff {
namespace {

#define FF_FOLD512 __attribute__((target("avx512f,vpclmulqdq,pclmul")))
#define FF_FOLD256 __attribute__((target("avx2,vpclmulqdq,pclmul")))

FF_FOLD512 inline __m512i load512(const unsigned char* p) { return _mm512_loadu_si512(p); }

FF_FOLD512 inline __m512i both512(CrcFactors::Pair pair) {
  const auto low = static_cast<long long>(pair.low), high = static_cast<long long>(pair.high);
  return _mm512_set4_epi64(high, low, high, low);
}

FF_FOLD512 inline __m512i fold512(__m512i acc, __m512i k, __m512i next) {
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(acc, k, 0x00), _mm512_clmulepi64_epi128(acc, k, 0x11), next,
                                   0x96);
}

// 512 bits of an accumulator in two registers.
struct Halves {
  __m256i low, high;
};

FF_FOLD256 inline Halves load256(const unsigned char* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}

FF_FOLD256 inline __m256i both256(CrcFactors::Pair pair) {
  const auto low = static_cast<long long>(pair.low), high = static_cast<long long>(pair.high);
  return _mm256_set_epi64x(high, low, high, low);
}

FF_FOLD256 inline __m256i fold_half(__m256i acc, __m256i k, __m256i next) {
  return _mm256_xor_si256(
      next, _mm256_xor_si256(_mm256_clmulepi64_epi128(acc, k, 0x00), _mm256_clmulepi64_epi128(acc, k, 0x11)));
}

FF_FOLD256 inline Halves fold256(Halves acc, __m256i k, Halves next) {
  return {fold_half(acc.low, k, next.low), fold_half(acc.high, k, next.high)};
}

// Folds four lanes of 128 bits onto the last lane.
__attribute__((target("pclmul,sse2"))) Folded join_lanes(const std::uint64_t* lanes, CrcFactors::Pair by128) {
  const __m128i k = _mm_set_epi64x(static_cast<long long>(by128.high), static_cast<long long>(by128.low));
  const auto* const from = reinterpret_cast<const __m128i*>(lanes);
  __m128i acc = _mm_load_si128(from);
  for (int lane = 1; lane < 4; ++lane) {
    acc = _mm_xor_si128(_mm_load_si128(from + lane),
                        _mm_xor_si128(_mm_clmulepi64_si128(acc, k, 0x00), _mm_clmulepi64_si128(acc, k, 0x11)));
  }
  return {static_cast<std::uint64_t>(_mm_cvtsi128_si64(acc)),
          static_cast<std::uint64_t>(_mm_cvtsi128_si64(_mm_unpackhi_epi64(acc, acc)))};
}

// Four independent accumulators of 512 bits hide the latency of the carry-less multiplication.
FF_FOLD512 Folded fold_512(std::uint32_t c, const unsigned char* p, std::size_t size, const CrcFactors& factors) {
  const __m512i by2048 = both512(factors.by2048), by512 = both512(factors.by512);
  __m512i a = _mm512_xor_si512(load512(p), _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(c))));
  __m512i b = load512(p + 64), d = load512(p + 128), e = load512(p + 192);
  for (p += 256, size -= 256; size >= 256; p += 256, size -= 256) {
    a = fold512(a, by2048, load512(p));
    b = fold512(b, by2048, load512(p + 64));
    d = fold512(d, by2048, load512(p + 128));
    e = fold512(e, by2048, load512(p + 192));
  }
  a = fold512(fold512(fold512(a, by512, b), by512, d), by512, e);
  for (; size >= 64; p += 64, size -= 64) a = fold512(a, by512, load512(p));
  alignas(64) std::uint64_t lanes[8];
  _mm512_store_si512(lanes, a);
  return join_lanes(lanes, factors.by128);
}

FF_FOLD256 Folded fold_256(std::uint32_t c, const unsigned char* p, std::size_t size, const CrcFactors& factors) {
  const __m256i by2048 = both256(factors.by2048), by512 = both256(factors.by512);
  Halves a = load256(p);
  a.low = _mm256_xor_si256(a.low, _mm256_zextsi128_si256(_mm_cvtsi32_si128(static_cast<int>(c))));
  Halves b = load256(p + 64), d = load256(p + 128), e = load256(p + 192);
  for (p += 256, size -= 256; size >= 256; p += 256, size -= 256) {
    a = fold256(a, by2048, load256(p));
    b = fold256(b, by2048, load256(p + 64));
    d = fold256(d, by2048, load256(p + 128));
    e = fold256(e, by2048, load256(p + 192));
  }
  a = fold256(fold256(fold256(a, by512, b), by512, d), by512, e);
  for (; size >= 64; p += 64, size -= 64) a = fold256(a, by512, load256(p));
  alignas(32) std::uint64_t lanes[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), a.low);
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes + 4), a.high);
  return join_lanes(lanes, factors.by128);
}

}  // namespace

CrcFold crc_fold(Isa isa) {
  if (isa == Isa::base || !able(isa) || !__builtin_cpu_supports("vpclmulqdq")) return nullptr;
  return isa == Isa::v4 ? fold_512 : fold_256;
}

int crc_width() {
  const CrcFold fold = crc_fold(isa());
  return fold == fold_512 ? 512 : fold == fold_256 ? 256 : 128;
}

}  // namespace ff
