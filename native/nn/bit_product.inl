// Products of bit planes: count the ones in words of 64 bits, for the eight rows of a panel of b at a time. Included by
// nn/kernels.inl, inside no namespace.
#pragma once

#include "nn/kernels.hpp"
#include "simd/lanes.inl"

namespace ff::nn {
namespace {

using Words = simd::Vector<std::uint64_t>;
constexpr std::size_t kParts = kPanel * sizeof(std::uint64_t) / simd::kWidth;  // vectors of a panel
constexpr std::size_t kTile = 4;                                               // rows of a at a time

#if defined(__AVX512BW__) || defined(__AVX2__)

// Counts the ones of each byte by two look-ups of four bits.
inline simd::U8 ones_of_bytes(Words v) {
#if defined(__AVX512BW__)
  // The zero-masked forms: the plain ones make GCC 12 warn of an uninitialized value.
  const __m512i table =
      _mm512_maskz_broadcast_i32x4(0xFFFF, _mm_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4));
  const __m512i low = simd::as<__m512i>(v & 0x0F0F0F0F0F0F0F0Fu);
  const __m512i high = simd::as<__m512i>((v >> 4) & 0x0F0F0F0F0F0F0F0Fu);
  return simd::as<simd::U8>(_mm512_maskz_shuffle_epi8(~0ull, table, low)) +
         simd::as<simd::U8>(_mm512_maskz_shuffle_epi8(~0ull, table, high));
#else
  const __m256i table = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4));
  const __m256i low = simd::as<__m256i>(v & 0x0F0F0F0F0F0F0F0Fu);
  const __m256i high = simd::as<__m256i>((v >> 4) & 0x0F0F0F0F0F0F0F0Fu);
  return simd::as<simd::U8>(_mm256_shuffle_epi8(table, low)) + simd::as<simd::U8>(_mm256_shuffle_epi8(table, high));
#endif
}

inline Words sum_of_bytes(simd::U8 v) {
#if defined(__AVX512BW__)
  return simd::as<Words>(_mm512_sad_epu8(simd::as<__m512i>(v), _mm512_setzero_si512()));
#else
  return simd::as<Words>(_mm256_sad_epu8(simd::as<__m256i>(v), _mm256_setzero_si256()));
#endif
}

constexpr std::size_t kRun = 31;  // words whose ones a byte can count: 31 * 8 ones are at most 255

// Adds to found[r][p] the number of ones in (row r of a) & (part p of the panel), lane by lane.
template <std::size_t rows>
inline __attribute__((always_inline)) void count_tile(const std::uint64_t* a, const std::uint64_t* b, std::size_t words,
                                                      Words (&found)[kTile][kParts]) {
  for (std::size_t begin = 0; begin < words; begin += kRun) {
    const std::size_t end = words - begin < kRun ? words : begin + kRun;
    simd::U8 bytes[rows][kParts] = {};
    for (std::size_t w = begin; w < end; ++w) {
      for (std::size_t p = 0; p < kParts; ++p) {
        const Words panel = simd::load<Words>(b + w * kPanel + p * (kPanel / kParts));
        for (std::size_t r = 0; r < rows; ++r) bytes[r][p] += ones_of_bytes(panel & a[r * words + w]);
      }
    }
    for (std::size_t r = 0; r < rows; ++r) {
      for (std::size_t p = 0; p < kParts; ++p) found[r][p] += sum_of_bytes(bytes[r][p]);
    }
  }
}

#else

template <std::size_t rows>
inline void count_tile(const std::uint64_t* a, const std::uint64_t* b, std::size_t words,
                       Words (&found)[kTile][kParts]) {
  constexpr std::uint64_t kPairs = 0x5555555555555555u, kFours = 0x3333333333333333u, kBytes = 0x0F0F0F0F0F0F0F0Fu;
  for (std::size_t w = 0; w < words; ++w) {
    for (std::size_t p = 0; p < kParts; ++p) {
      const Words panel = simd::load<Words>(b + w * kPanel + p * (kPanel / kParts));
      for (std::size_t r = 0; r < rows; ++r) {
        Words v = panel & a[r * words + w];
        v -= (v >> 1) & kPairs;
        v = (v & kFours) + ((v >> 2) & kFours);
        v = (v + (v >> 4)) & kBytes;
        v += v >> 8;
        v += v >> 16;
        found[r][p] += (v + (v >> 32)) & 0x7Fu;
      }
    }
  }
}

#endif

using CountTile = void (*)(const std::uint64_t* a, const std::uint64_t* b, std::size_t words,
                           Words (&found)[kTile][kParts]);

#if defined(__AVX512BW__)

// Like count_tile(), but with an instruction that only some processors with AVX-512 have.
template <std::size_t rows>
__attribute__((target("avx512vpopcntdq"))) void count_tile_at_once(const std::uint64_t* a, const std::uint64_t* b,
                                                                   std::size_t words, Words (&found)[kTile][kParts]) {
  __m512i counts[rows];
  for (auto& count : counts) count = _mm512_setzero_si512();
  for (std::size_t w = 0; w < words; ++w) {
    const __m512i panel = _mm512_loadu_si512(b + w * kPanel);
    for (std::size_t r = 0; r < rows; ++r) {
      const __m512i row = _mm512_set1_epi64(static_cast<long long>(a[r * words + w]));
      counts[r] = _mm512_add_epi64(counts[r], _mm512_popcnt_epi64(_mm512_and_si512(panel, row)));
    }
  }
  for (std::size_t r = 0; r < rows; ++r) found[r][0] += simd::as<Words>(counts[r]);
}

inline CountTile whole_tile() {
  return __builtin_cpu_supports("avx512vpopcntdq") ? count_tile_at_once<kTile> : count_tile<kTile>;
}
inline CountTile single_row() {
  return __builtin_cpu_supports("avx512vpopcntdq") ? count_tile_at_once<1> : count_tile<1>;
}

#else

inline CountTile whole_tile() { return count_tile<kTile>; }
inline CountTile single_row() { return count_tile<1>; }

#endif

void bit_product(const std::uint64_t* a, std::size_t planes_a, std::size_t stride_rows, const std::uint64_t* b,
                 std::size_t planes_b, std::size_t rows, std::size_t panels, std::size_t words, std::int32_t* out) {
  const CountTile tile = whole_tile(), single = single_row();
  for (std::size_t panel = 0; panel < panels; ++panel) {
    for (std::size_t m = 0; m < rows;) {
      const std::size_t step = rows - m < kTile ? 1 : kTile;
      Words total[kTile][kParts] = {};
      for (std::size_t j = 0; j < planes_b; ++j) {
        for (std::size_t i = 0; i < planes_a; ++i) {
          Words found[kTile][kParts] = {};
          (step == 1 ? single : tile)(a + (i * stride_rows + m) * words, b + (j * panels + panel) * words * kPanel,
                                      words, found);
          for (std::size_t r = 0; r < step; ++r) {
            for (std::size_t p = 0; p < kParts; ++p) total[r][p] += found[r][p] << (i + j);
          }
        }
      }
      for (std::size_t r = 0; r < step; ++r) {
        for (std::size_t n = 0; n < kPanel; ++n) {
          constexpr std::size_t kLanes = kPanel / kParts;
          out[(m + r) * panels * kPanel + panel * kPanel + n] =
              static_cast<std::int32_t>(total[r][n / kLanes][n % kLanes]);
        }
      }
      m += step;
    }
  }
}

}  // namespace
}  // namespace ff::nn
