#include "base/isa.hpp"
#include "simd/kernels.hpp"

namespace ff::simd {

extern const Kernels kernels_base, kernels_v3, kernels_v4;

const Kernels* kernels_for(const char* isa) { return table_for(isa, kernels_base, kernels_v3, kernels_v4); }

const Kernels& kernels() {
  static const Kernels& table = *kernels_for(name(isa()));
  return table;
}

namespace {

template <std::size_t n, class T>
T entry(const T (&table)[n], std::uint32_t i) {
  return i < n ? table[i] : T{};
}

}  // namespace

ReduceFn reduce_kernel(DType dtype, Op op) {
  const auto row = static_cast<std::uint32_t>(dtype);
  return row <= kDTypes ? entry(kernels().reduce[row], static_cast<std::uint32_t>(op)) : nullptr;
}

ReduceFn widen_kernel(DType dtype) { return entry(kernels().widen, static_cast<std::uint32_t>(dtype)); }

ReduceFn narrow_kernel(DType dtype) { return entry(kernels().narrow, static_cast<std::uint32_t>(dtype)); }

}  // namespace ff::simd
