// Included once by each kernels_<isa>.cpp, which sets FF_TABLE (symbol). The rules of simd/kernels.inl hold: no
// standard-library templates, internal linkage of all but the table.
#include "nn/kernels.hpp"

#include "nn/bit_product.inl"
#include "nn/rms_norm.inl"
#include "nn/rows.inl"
#include "nn/swiglu.inl"
#include "simd/elements.inl"
#include "simd/noise.inl"

namespace ff::nn {
namespace {

using simd::F64;
using I64 = simd::Vector<std::int64_t>;

// Conversions between bits and masks as wide as the accumulators' lanes.
#if defined(__AVX512BW__)
inline std::uint64_t bits_of(I32 mask) { return _mm512_movepi32_mask(simd::as<__m512i>(mask)); }
inline std::uint64_t bits_of(I64 mask) { return _mm512_movepi64_mask(simd::as<__m512i>(mask)); }
#elif defined(__AVX2__)
inline std::uint64_t bits_of(I32 mask) { return static_cast<unsigned>(_mm256_movemask_ps(simd::as<__m256>(mask))); }
inline std::uint64_t bits_of(I64 mask) { return static_cast<unsigned>(_mm256_movemask_pd(simd::as<__m256d>(mask))); }
#else
inline std::uint64_t bits_of(I32 mask) { return static_cast<unsigned>(_mm_movemask_ps(simd::as<__m128>(mask))); }
inline std::uint64_t bits_of(I64 mask) { return static_cast<unsigned>(_mm_movemask_pd(simd::as<__m128d>(mask))); }
#endif

template <class I, class Lane>
inline I mask_of_lanes(std::uint64_t bits) {
  I own = {};
  for (std::size_t j = 0; j < sizeof(I) / sizeof(Lane); ++j) own[j] = Lane{1} << j;
  return (splat<I>(static_cast<Lane>(bits & 0xFFFF)) & own) == own;
}
inline I32 mask_of(std::uint64_t bits, F32) { return mask_of_lanes<I32, std::int32_t>(bits); }
inline I64 mask_of(std::uint64_t bits, F64) { return mask_of_lanes<I64, std::int64_t>(bits); }

// Reads one step of T at x, applies each(v, i) to its accumulators, and writes them, rounded, to y.
template <class T, class Each>
inline __attribute__((always_inline)) void map_step(const char* x, char* y, std::size_t i, Each each) {
  typename T::Vec v[kVectors];
  T::read(x, v);
  each(v, i);
  typename T::Raw raw[T::kRaw];
  round_step<T>(v, raw);
  for (std::size_t j = 0; j < T::kRaw; ++j) simd::store(y + j * simd::kWidth, raw[j]);
}

// Applies map_step to `count` elements. Elements after the last whole step go through a buffer of a step.
template <class T, class Each>
inline __attribute__((always_inline)) void map(const void* from, void* to, std::size_t count, Each each) {
  const char* x = static_cast<const char*>(from);
  char* y = static_cast<char*>(to);
  std::size_t i = 0;
  for (; count - i >= T::step; i += T::step) map_step<T>(x + i * T::size, y + i * T::size, i, each);
  if (i < count) {
    char buffer[T::step * T::size] = {};
    std::memcpy(buffer, x + i * T::size, (count - i) * T::size);
    map_step<T>(buffer, buffer, i, each);
    std::memcpy(y + i * T::size, buffer, (count - i) * T::size);
  }
}

template <class T>
constexpr std::size_t kLanesOf = T::step / kVectors;

template <class T>
inline std::uint64_t read_bits(const std::uint8_t* bits, std::size_t i) {
  std::uint64_t word = 0;
  std::memcpy(&word, bits + i / 8, T::step / 8);
  return word;
}

struct Relu {
  template <class V>
  static auto passes(V x, V) {
    return ~(x <= V{});
  }  // NaN passes
  template <class V>
  static V value(V x, V) {
    return x < V{} ? V{} : x;
  }
};

struct Relu6 {
  template <class V>
  static auto passes(V x, V) {
    return (x > V{}) & (x < splat<V>(6.0f));
  }
  template <class V>
  static V value(V x, V) {
    const V positive = x < V{} ? V{} : x;
    return positive > splat<V>(6.0f) ? splat<V>(6.0f) : positive;
  }
};

struct Leaky {
  template <class V>
  static auto passes(V x, V) {
    return x > V{};
  }
  template <class V>
  static V value(V x, V slope) {
    return x > V{} ? x : x * slope;
  }
};

template <class T, class Operation>
void forward(const void* x, void* y, std::uint8_t* bits, std::size_t count, double slope) {
  using Vec = typename T::Vec;
  const Vec factor = splat<Vec>(static_cast<typename T::Scalar>(slope));
  map<T>(x, y, count, [&](Vec(&v)[kVectors], std::size_t i) {
    std::uint64_t word = 0;
    for (std::size_t j = 0; j < kVectors; ++j) {
      word |= bits_of(Operation::passes(v[j], factor)) << (j * kLanesOf<T>);
      v[j] = Operation::value(v[j], factor);
    }
    std::memcpy(bits + i / 8, &word, T::step / 8);
  });
}

template <class T, bool leaking>
void backward(const void* g, const std::uint8_t* bits, void* dx, std::size_t count, double slope) {
  using Vec = typename T::Vec;
  const Vec factor = splat<Vec>(static_cast<typename T::Scalar>(slope));
  map<T>(g, dx, count, [&](Vec(&v)[kVectors], std::size_t i) {
    const std::uint64_t word = read_bits<T>(bits, i);
    for (std::size_t j = 0; j < kVectors; ++j) {
      const auto mask = mask_of(word >> (j * kLanesOf<T>), v[j]);
      v[j] = mask ? v[j] : leaking ? v[j] * factor : Vec{};
    }
  });
}

// Sets `found` to zero for dropped elements and to `scale` for the other elements. One draw of random numbers serves one
// vector, or two vectors of doubles.
inline void factors(simd::Noise& noise, std::uint32_t threshold, F32 scale, F32 (&found)[kVectors]) {
  for (auto& part : found) {
    part = noise.next() < splat<simd::U32>(threshold) ? F32{} : scale;
  }
}
inline void factors(simd::Noise& noise, std::uint32_t threshold, F64 scale, F64 (&found)[kVectors]) {
  using Half = simd::Vector<std::int32_t, simd::kWidth / 2>;
  for (std::size_t j = 0; j < kVectors; j += 2) {
    const I32 dropped = noise.next() < splat<simd::U32>(threshold);
    for (std::size_t half = 0; half < 2; ++half) {
      const Half part = simd::load<Half>(reinterpret_cast<const char*>(&dropped) + half * sizeof(Half));
      found[j + half] = __builtin_convertvector(part, I64) ? F64{} : scale;
    }
  }
}

template <class T>
void dropout(const void* x, void* y, std::size_t count, std::uint64_t seed, std::uint64_t first,
             std::uint32_t threshold, double scale) {
  using Vec = typename T::Vec;
  const Vec kept = splat<Vec>(static_cast<typename T::Scalar>(scale));
  simd::Noise noise(seed, first);
  map<T>(x, y, count, [&](Vec(&v)[kVectors], std::size_t) {
    Vec factor[kVectors];
    factors(noise, threshold, kept, factor);
    for (std::size_t j = 0; j < kVectors; ++j) v[j] *= factor[j];
  });
}

template <class T>
constexpr void add(Kernels& table, Float type) {
  const auto at = static_cast<std::size_t>(type);
  table.forward[static_cast<std::size_t>(Activation::relu)][at] = forward<T, Relu>;
  table.forward[static_cast<std::size_t>(Activation::relu6)][at] = forward<T, Relu6>;
  table.forward[static_cast<std::size_t>(Activation::leaky)][at] = forward<T, Leaky>;
  table.select[at] = backward<T, false>;
  table.leak[at] = backward<T, true>;
  table.dropout[at] = dropout<T>;
  table.rms_norm[at] = rms_norm<T>;
  table.rms_norm_backward[at] = rms_norm_backward<T>;
  if constexpr (T::size != 8) {
    table.swiglu[at] = swiglu<T>;
    table.swiglu_backward[at] = swiglu_backward<T>;
  }
}

constexpr Kernels make_table() {
  Kernels table{};
  add<simd::Float32>(table, Float::f32);
  add<simd::Float64>(table, Float::f64);
  add<simd::Float16>(table, Float::f16);
  add<simd::NaturalBFloat16>(table, Float::bf16);
  table.bit_product = bit_product;
  return table;
}

}  // namespace

extern const Kernels FF_TABLE;
constinit const Kernels FF_TABLE = make_table();

}  // namespace ff::nn
