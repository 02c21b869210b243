#include "base/crc/crc32.hpp"

#include <immintrin.h>

#include <array>
#include <cstring>

namespace ff {
namespace {

constexpr std::uint32_t kPolynomial = 0xEDB88320;  // reflected

constexpr std::array<std::array<std::uint32_t, 256>, 8> make_tables() {
  std::array<std::array<std::uint32_t, 256>, 8> tables{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t c = i;
    for (int bit = 0; bit < 8; ++bit) c = (c >> 1) ^ ((c & 1) ? kPolynomial : 0);
    tables[0][i] = c;
  }
  for (std::uint32_t i = 0; i < 256; ++i) {
    for (std::size_t t = 1; t < 8; ++t) {
      const std::uint32_t previous = tables[t - 1][i];
      tables[t][i] = (previous >> 8) ^ tables[0][previous & 0xFF];
    }
  }
  return tables;
}

constexpr auto kTables = make_tables();

// Processes eight bytes a step by tables ("slicing by 8", Kounavis and Berry 2005). Works on the inverted register.
std::uint32_t crc32_tables(std::uint32_t c, const unsigned char* p, std::size_t size) {
  for (; size >= 8; p += 8, size -= 8) {
    std::uint32_t low, high;
    std::memcpy(&low, p, 4);
    std::memcpy(&high, p + 4, 4);
    low ^= c;
    c = kTables[7][low & 0xFF] ^ kTables[6][(low >> 8) & 0xFF] ^ kTables[5][(low >> 16) & 0xFF] ^
        kTables[4][low >> 24] ^ kTables[3][high & 0xFF] ^ kTables[2][(high >> 8) & 0xFF] ^
        kTables[1][(high >> 16) & 0xFF] ^ kTables[0][high >> 24];
  }
  for (; size > 0; ++p, --size) c = (c >> 8) ^ kTables[0][(c ^ *p) & 0xFF];
  return c;
}

constexpr CrcFactors kFactors = {.by2048 = {0x011542778a, 0x01322d1430},
                                 .by512 = {0x0154442bd4, 0x01c6e41596},
                                 .by128 = {0x01751997d0, 0x00ccaa009e}};

#define FF_CLMUL __attribute__((target("pclmul,sse4.1")))

FF_CLMUL inline __m128i load(const unsigned char* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }

FF_CLMUL inline __m128i pair(CrcFactors::Pair both) {
  return _mm_set_epi64x(static_cast<long long>(both.high), static_cast<long long>(both.low));
}

// Returns acc * x^k folded onto the next 128 bits; `k` holds the two remainders for that distance.
FF_CLMUL inline __m128i fold(__m128i acc, __m128i k, __m128i next) {
  return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(acc, k, 0x00), _mm_clmulepi64_si128(acc, k, 0x11)), next);
}

// Folds the rest of the message onto `a`, the folded beginning. Returns the register after the whole message, by
// Barrett reduction. REQUIRES: size is a multiple of 16.
FF_CLMUL inline std::uint32_t finish(__m128i a, const unsigned char* p, std::size_t size) {
  const __m128i fold128 = pair(kFactors.by128);
  const __m128i fold64 = _mm_set_epi64x(0, 0x0163cd6124);
  const __m128i barrett = _mm_set_epi64x(0x01f7011641, 0x01db710641);
  for (; size >= 16; p += 16, size -= 16) a = fold(a, fold128, load(p));

  const __m128i low32 = _mm_setr_epi32(-1, 0, -1, 0);
  a = _mm_xor_si128(_mm_srli_si128(a, 8), _mm_clmulepi64_si128(a, fold128, 0x10));
  a = _mm_xor_si128(_mm_srli_si128(a, 4), _mm_clmulepi64_si128(_mm_and_si128(a, low32), fold64, 0x00));
  __m128i q = _mm_clmulepi64_si128(_mm_and_si128(a, low32), barrett, 0x10);
  q = _mm_clmulepi64_si128(_mm_and_si128(q, low32), barrett, 0x00);
  return static_cast<std::uint32_t>(_mm_extract_epi32(_mm_xor_si128(a, q), 1));
}

// Carry-less multiplication with four 128-bit lanes in flight (Gopal et al., "Fast CRC Computation for Generic
// Polynomials Using PCLMULQDQ", Intel 2009; constants from there). If `wider` is not null, it folds the first part.
// REQUIRES: size >= 64 and a multiple of 16.
FF_CLMUL std::uint32_t crc32_clmul(CrcFold wider, std::uint32_t c, const unsigned char* p, std::size_t size) {
  if (wider != nullptr && size >= 256) {
    const std::size_t folded = size & ~std::size_t{63};
    const Folded a = wider(c, p, folded, kFactors);
    return finish(pair({a.low, a.high}), p + folded, size - folded);
  }
  const __m128i fold512 = pair(kFactors.by512);
  const __m128i fold128 = pair(kFactors.by128);
  __m128i a = _mm_xor_si128(load(p), _mm_cvtsi32_si128(static_cast<int>(c)));
  __m128i b = load(p + 16), d = load(p + 32), e = load(p + 48);
  for (p += 64, size -= 64; size >= 64; p += 64, size -= 64) {
    a = fold(a, fold512, load(p));
    b = fold(b, fold512, load(p + 16));
    d = fold(d, fold512, load(p + 32));
    e = fold(e, fold512, load(p + 48));
  }
  a = fold(a, fold128, b);
  a = fold(a, fold128, d);
  a = fold(a, fold128, e);
  return finish(a, p, size);
}

}  // namespace

std::uint32_t detail::crc32_portable(std::uint32_t value, const void* data, std::size_t size) {
  return ~crc32_tables(~value, static_cast<const unsigned char*>(data), size);
}

std::uint32_t detail::crc32_by(CrcFold wider, std::uint32_t value, const void* data, std::size_t size) {
  static const bool clmul = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  if (!clmul || size < 64) return crc32_portable(value, data, size);
  const auto* const p = static_cast<const unsigned char*>(data);
  const std::size_t bulk = size & ~std::size_t{15};
  return ~crc32_tables(crc32_clmul(wider, ~value, p, bulk), p + bulk, size - bulk);
}

std::uint32_t crc32(std::uint32_t value, const void* data, std::size_t size) {
  static const CrcFold widest = crc_fold(isa());
  return detail::crc32_by(widest, value, data, size);
}

}  // namespace ff
