#include <array>
#include <cstring>
#include <utility>

#include "base/isa.hpp"
#include "nn/kernels.hpp"

namespace ff::nn {

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

}  // namespace ff::nn
