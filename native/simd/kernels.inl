// Included once by each kernels_<isa>.cpp, which sets FF_ISA (name) and FF_TABLE (symbol). The units include no
// standard-library templates: an inline function compiled for AVX-512 must never be picked by the linker
// for a processor without it.
#include <cstdint>
#include <cstring>

#include "simd/kernels.hpp"

namespace ff::simd {
namespace {

typedef float F32x16 __attribute__((vector_size(64)));
typedef double F64x8 __attribute__((vector_size(64)));
typedef std::uint16_t U16x16 __attribute__((vector_size(32)));
typedef std::uint32_t U32x16 __attribute__((vector_size(64)));
typedef std::int32_t I32x16 __attribute__((vector_size(64)));

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

inline U32x16 bits(F32x16 v) {
  U32x16 r;
  std::memcpy(&r, &v, sizeof r);
  return r;
}

// Each element type: storage size, vector of accumulators, widening load, rounding store.
struct F32 {
  using Vec = F32x16;
  using Acc = float;
  static constexpr std::size_t size = 4, lanes = 16;
  static Vec read(const char* p) { return load<Vec>(p); }
  static void write(char* p, Vec v) { store(p, v); }
  static Acc read1(const char* p) { return load<float>(p); }
  static void write1(char* p, Acc v) { store(p, v); }
};

struct F64 {
  using Vec = F64x8;
  using Acc = double;
  static constexpr std::size_t size = 8, lanes = 8;
  static Vec read(const char* p) { return load<Vec>(p); }
  static void write(char* p, Vec v) { store(p, v); }
  static Acc read1(const char* p) { return load<double>(p); }
  static void write1(char* p, Acc v) { store(p, v); }
};

// bf16 is the upper half of an f32; rounding is to nearest even, NaN stays NaN (made quiet).
struct BF16 {
  using Vec = F32x16;
  using Acc = float;
  static constexpr std::size_t size = 2, lanes = 16;
  static Vec read(const char* p) {
    const U32x16 wide = __builtin_convertvector(load<U16x16>(p), U32x16) << 16;
    F32x16 r;
    std::memcpy(&r, &wide, sizeof r);
    return r;
  }
  static void write(char* p, Vec v) {
    const U32x16 b = bits(v);
    const U32x16 rounded = (b + 0x7FFF + ((b >> 16) & 1)) >> 16;
    const U32x16 quiet = (b >> 16) | 0x40;
    const I32x16 nan = v != v;
    const U32x16 r = nan ? quiet : rounded;
    store(p, __builtin_convertvector(r, U16x16));
  }
  static Acc read1(const char* p) {
    const std::uint32_t b = static_cast<std::uint32_t>(load<std::uint16_t>(p)) << 16;
    return load<float>(&b);
  }
  static void write1(char* p, Acc v) {
    const auto b = load<std::uint32_t>(&v);
    const std::uint32_t r = v != v ? (b >> 16) | 0x40 : (b + 0x7FFF + ((b >> 16) & 1)) >> 16;
    store(p, static_cast<std::uint16_t>(r));
  }
};

// One pass: every source is read once, every destination written once; four vectors are in flight.
template <class T>
void sum(void* const* dst, std::size_t dsts, const void* const* src, std::size_t srcs,
         std::size_t count, double scale_f64) {
  using Vec = typename T::Vec;
  const auto scale = static_cast<typename T::Acc>(scale_f64);
  const bool scaled = scale_f64 != 1.0;
  constexpr std::size_t step = T::lanes * T::size;
  std::size_t i = 0;
  const std::size_t bulk = count / (4 * T::lanes) * (4 * T::lanes);
  for (; i < bulk; i += 4 * T::lanes) {
    const char* s = static_cast<const char*>(src[0]) + i * T::size;
    Vec a = T::read(s), b = T::read(s + step), c = T::read(s + 2 * step),
        d = T::read(s + 3 * step);
    for (std::size_t k = 1; k < srcs; ++k) {
      s = static_cast<const char*>(src[k]) + i * T::size;
      a += T::read(s);
      b += T::read(s + step);
      c += T::read(s + 2 * step);
      d += T::read(s + 3 * step);
    }
    if (scaled) {
      a *= scale;
      b *= scale;
      c *= scale;
      d *= scale;
    }
    for (std::size_t k = 0; k < dsts; ++k) {
      char* t = static_cast<char*>(dst[k]) + i * T::size;
      T::write(t, a);
      T::write(t + step, b);
      T::write(t + 2 * step, c);
      T::write(t + 3 * step, d);
    }
  }
  for (; i < count; ++i) {
    typename T::Acc acc = T::read1(static_cast<const char*>(src[0]) + i * T::size);
    for (std::size_t k = 1; k < srcs; ++k) {
      acc += T::read1(static_cast<const char*>(src[k]) + i * T::size);
    }
    if (scaled) acc *= scale;
    for (std::size_t k = 0; k < dsts; ++k) T::write1(static_cast<char*>(dst[k]) + i * T::size, acc);
  }
}

}  // namespace

extern const Kernels FF_TABLE;
const Kernels FF_TABLE = {FF_ISA, sum<F32>, sum<F64>, sum<BF16>};

}  // namespace ff::simd
