// Included once by each kernels_<isa>.cpp, which sets FF_ISA (name) and FF_TABLE (symbol). The units include no
// standard-library templates, and all they define but the table has internal linkage: an inline function compiled for
// AVX-512 must never be picked by the linker for a processor without it.
#include "simd/kernels.hpp"

#include "simd/codecs.inl"
#include "simd/elements.inl"

namespace ff::simd {
namespace {

struct Sum {
  static constexpr bool scales = true;
  template <class V>
  static V apply(V a, V b) {
    return a + b;
  }
};

struct Product {
  static constexpr bool scales = true;
  template <class V>
  static V apply(V a, V b) {
    return a * b;
  }
};

// `b == b` fails for NaN alone; a NaN in `a` stays since no comparison with it holds.
struct Min {
  static constexpr bool scales = false;
  template <class V>
  static V apply(V a, V b) {
    const V least = b < a ? b : a;
    return b == b ? least : b;
  }
};

struct Max {
  static constexpr bool scales = false;
  template <class V>
  static V apply(V a, V b) {
    const V most = b > a ? b : a;
    return b == b ? most : b;
  }
};

struct And {
  static constexpr bool scales = false;
  template <class V>
  static V apply(V a, V b) {
    return a & b;
  }
};

struct Or {
  static constexpr bool scales = false;
  template <class V>
  static V apply(V a, V b) {
    return a | b;
  }
};

struct Xor {
  static constexpr bool scales = false;
  template <class V>
  static V apply(V a, V b) {
    return a ^ b;
  }
};

// Distance in bytes at which sources are prefetched. Without prefetching, types that take more instructions a byte keep
// too few cache misses in flight. Prefetching makes bf16 in memory a third faster, and costs nothing for data in cache.
constexpr std::size_t kAhead = 2048;

inline void ask_ahead(const char* p, std::size_t bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(p) + kAhead;  // may lie past the end
  for (std::size_t j = 0; j < bytes; j += 64) {
    __builtin_prefetch(reinterpret_cast<const void*>(address + j));
  }
}

// Does one step of the reduction. source(k) is the address of From::step elements of source k, target(k) that of
// destination k.
template <class Operation, class From, class To, class Source, class Target>
inline __attribute__((always_inline)) void reduce_step(std::size_t dsts, std::size_t srcs, double scale, Source source,
                                                       Target target) {
  typename From::Vec acc[kVectors], x[kVectors];
  From::read(source(0), acc);
  for (std::size_t k = 1; k < srcs; ++k) {
    From::read(source(k), x);
    for (std::size_t j = 0; j < kVectors; ++j) acc[j] = Operation::apply(acc[j], x[j]);
  }
  if constexpr (From::floating) {
    if (Operation::scales && scale != 1.0) {
      for (auto& v : acc) v *= static_cast<typename From::Scalar>(scale);
    }
    if (__builtin_expect(any_nan(acc[0], acc[1], acc[2], acc[3]), 0)) {
      for (auto& v : acc) v = v == v ? v : From::quiet();
    }
  }
  typename To::Raw raw[To::kRaw];
  To::round(acc, raw);
  for (std::size_t k = 0; k < dsts; ++k) {
    char* p = target(k);
    for (std::size_t j = 0; j < To::kRaw; ++j) store(p + j * kWidth, raw[j]);
  }
}

// Reduces the `rest` < From::step elements from i on, through buffers of a whole step.
template <class Operation, class From, class To>
__attribute__((noinline)) void reduce_rest(void* const* dst, std::size_t dsts, const void* const* src, std::size_t srcs,
                                           std::size_t i, std::size_t rest, double scale) {
  char in[From::step * From::size] = {}, out[To::step * To::size];
  const auto source = [&](std::size_t k) {
    std::memcpy(in, static_cast<const char*>(src[k]) + i * From::size, rest * From::size);
    return in;
  };
  reduce_step<Operation, From, To>(1, srcs, scale, source, [&](std::size_t) { return out; });
  for (std::size_t k = 0; k < dsts; ++k) {
    std::memcpy(static_cast<char*>(dst[k]) + i * To::size, out, rest * To::size);
  }
}

template <class Operation, class From, class To = From>
void reduce(void* const* dst, std::size_t dsts, const void* const* src, std::size_t srcs, std::size_t count,
            double scale) {
  static_assert(From::step == To::step);
  std::size_t i = 0;
  for (; count - i >= From::step; i += From::step) {
    reduce_step<Operation, From, To>(
        dsts, srcs, scale,
        [&](std::size_t k) {
          const char* const p = static_cast<const char*>(src[k]) + i * From::size;
          ask_ahead(p, From::step * From::size);
          return p;
        },
        [&](std::size_t k) { return static_cast<char*>(dst[k]) + i * To::size; });
  }
  if (i < count) reduce_rest<Operation, From, To>(dst, dsts, src, srcs, i, count - i, scale);
}

constexpr std::size_t at(DType dtype) { return static_cast<std::size_t>(dtype); }
constexpr std::size_t at(Op op) { return static_cast<std::size_t>(op); }

template <class T>
constexpr void add_floating(Kernels& table, DType dtype) {
  ReduceFn(&row)[kOps + 1] = table.reduce[at(dtype)];
  row[at(Op::sum)] = row[at(Op::avg)] = reduce<Sum, T>;
  row[at(Op::product)] = reduce<Product, T>;
  row[at(Op::min)] = reduce<Min, T>;
  row[at(Op::max)] = reduce<Max, T>;
}

// Wrapped sums and products have the same bits for signed and unsigned types, but C++ defines only unsigned overflow.
template <class T, class Unsigned>
constexpr void add_integer(Kernels& table, DType dtype) {
  ReduceFn(&row)[kOps + 1] = table.reduce[at(dtype)];
  row[at(Op::sum)] = reduce<Sum, Plain<Unsigned>>;
  row[at(Op::product)] = reduce<Product, Plain<Unsigned>>;
  row[at(Op::min)] = reduce<Min, Plain<T>>;
  row[at(Op::max)] = reduce<Max, Plain<T>>;
  row[at(Op::band)] = reduce<And, Plain<Unsigned>>;
  row[at(Op::bor)] = reduce<Or, Plain<Unsigned>>;
  row[at(Op::bxor)] = reduce<Xor, Plain<Unsigned>>;
}

template <class T>
constexpr void add_ends(Kernels& table, DType dtype) {
  table.widen[at(dtype)] = reduce<Sum, T, Float32>;
  table.narrow[at(dtype)] = reduce<Sum, Float32, T>;
}

constexpr Kernels make_table() {
  Kernels table{};
  table.isa = FF_ISA;
  add_floating<Float32>(table, DType::f32);
  add_floating<Float64>(table, DType::f64);
  add_floating<Float16>(table, DType::f16);
  add_floating<BFloat16>(table, DType::bf16);
  add_floating<Float8E4M3>(table, DType::f8e4m3);
  add_floating<Float8E5M2>(table, DType::f8e5m2);
  add_integer<std::int64_t, std::uint64_t>(table, DType::i64);
  add_integer<std::int32_t, std::uint32_t>(table, DType::i32);
  add_integer<std::int16_t, std::uint16_t>(table, DType::i16);
  add_integer<std::int8_t, std::uint8_t>(table, DType::i8);
  add_integer<std::uint8_t, std::uint8_t>(table, DType::u8);
  ReduceFn(&row)[kOps + 1] = table.reduce[at(DType::boolean)];
  row[at(Op::sum)] = row[at(Op::max)] = row[at(Op::bor)] = reduce<Or, Bool>;
  row[at(Op::product)] = row[at(Op::min)] = row[at(Op::band)] = reduce<And, Bool>;
  row[at(Op::bxor)] = reduce<Xor, Bool>;
  add_ends<Float32>(table, DType::f32);
  add_ends<Float16>(table, DType::f16);
  add_ends<NaturalBFloat16>(table, DType::bf16);
  add_ends<Float8E4M3>(table, DType::f8e4m3);
  add_ends<Float8E5M2>(table, DType::f8e5m2);
  table.codec = {dither<dither_to_bf16>, dither<dither_to_f16>, encode_int8, decode_int8, subtract};
  return table;
}

}  // namespace

extern const Kernels FF_TABLE;
constinit const Kernels FF_TABLE = make_table();

}  // namespace ff::simd
