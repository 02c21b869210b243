#include "base/isa.hpp"

#include <array>
#include <cstdlib>
#include <string>
#include <string_view>

#include "base/error.hpp"

namespace ff {
namespace {

constexpr std::array kWidestFirst = {Isa::v4, Isa::v3, Isa::base};

Isa pick_isa() {
  const char* const set = std::getenv("FIREFLYER_ISA");
  const std::string_view forced = set != nullptr ? set : "";
  for (const Isa isa : kWidestFirst) {
    if (able(isa) && (forced.empty() || forced == name(isa))) return isa;
  }
  std::string known;
  for (const Isa isa : kWidestFirst) {
    if (able(isa)) known += (known.empty() ? "" : isa == Isa::base ? " or " : ", ") + std::string(name(isa));
  }
  throw Error(Code::invalid, "invalid FIREFLYER_ISA '" + std::string(forced) + "': expected " + known +
                                 ", which this processor runs; unset it for the widest");
}

}  // namespace

const char* name(Isa isa) { return isa == Isa::v4 ? "v4" : isa == Isa::v3 ? "v3" : "base"; }

bool able(Isa isa) {
  switch (isa) {
    case Isa::base: return true;
    case Isa::v3: return __builtin_cpu_supports("x86-64-v3");
    case Isa::v4: return __builtin_cpu_supports("x86-64-v4");
  }
  return false;
}

Isa isa() {
  static const Isa picked = pick_isa();
  return picked;
}

}  // namespace ff
