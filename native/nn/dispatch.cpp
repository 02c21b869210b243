#include "base/isa.hpp"
#include "nn/kernels.hpp"

namespace ff::nn {

extern const Kernels kernels_base, kernels_v3, kernels_v4;

const Kernels* kernels_for(const char* isa) { return table_for(isa, kernels_base, kernels_v3, kernels_v4); }

const Kernels& kernels() {
  static const Kernels& table = *kernels_for(name(isa()));
  return table;
}

}  // namespace ff::nn
