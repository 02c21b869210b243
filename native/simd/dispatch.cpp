#include <array>
#include <cstring>
#include <utility>

#include "base/isa.hpp"
#include "simd/kernels.hpp"

namespace ff::simd {

extern const Kernels kernels_base, kernels_v3, kernels_v4;

const Kernels* kernels_for(const char* isa) {
  constexpr std::array<std::pair<Isa, const Kernels*>, 3> tables = {
      {{Isa::base, &kernels_base}, {Isa::v3, &kernels_v3}, {Isa::v4, &kernels_v4}}};
  for (const auto& [its, table] : tables) {
    if (std::strcmp(isa, name(its)) == 0 && able(its)) return table;
  }
  return nullptr;
}

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

ReduceFn widen_kernel(DType dtype) {
  return entry(kernels().widen, static_cast<std::uint32_t>(dtype));
}

ReduceFn narrow_kernel(DType dtype) {
  return entry(kernels().narrow, static_cast<std::uint32_t>(dtype));
}

}  // namespace ff::simd
