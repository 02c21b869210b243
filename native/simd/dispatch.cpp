#include <cstdlib>
#include <cstring>
#include <string>

#include "base/error.hpp"
#include "simd/kernels.hpp"

namespace ff::simd {

extern const Kernels kernels_base, kernels_v3, kernels_v4;

namespace {

const Kernels& pick() {
  if (const char* forced = std::getenv("FIREFLYER_ISA"); forced != nullptr && *forced != '\0') {
    if (const Kernels* table = kernels_for(forced)) return *table;
    throw Error(Code::invalid, std::string("FIREFLYER_ISA=") + forced +
                                   ": not an instruction set of this processor; use base, v3 or v4");
  }
  for (const char* isa : {"v4", "v3"}) {
    if (const Kernels* table = kernels_for(isa)) return *table;
  }
  return kernels_base;
}

}  // namespace

const Kernels* kernels_for(const char* isa) {
  if (std::strcmp(isa, "base") == 0) return &kernels_base;
  if (std::strcmp(isa, "v3") == 0 && __builtin_cpu_supports("x86-64-v3")) return &kernels_v3;
  if (std::strcmp(isa, "v4") == 0 && __builtin_cpu_supports("x86-64-v4")) return &kernels_v4;
  return nullptr;
}

const Kernels& kernels() {
  static const Kernels& table = pick();
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
