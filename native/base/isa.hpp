// Instruction sets for which code is compiled in several variants, and the instruction set in use. Thread-safe; the
// only state is the result of the first call of isa().
#pragma once

#include <cstring>
#include <utility>

namespace ff {

enum class Isa {
  base,  // x86-64; for CRCs also SSE4.2 and PCLMULQDQ if the processor has them
  v3,    // AVX2; also VPCLMULQDQ on 256 bits if the processor has it
  v4,    // AVX-512, and VPCLMULQDQ on 512 bits
};

const char* name(Isa isa);  // "base", "v3" or "v4"
bool able(Isa isa);         // true if this processor runs the set

// Returns the widest set that this processor runs. The environment's FIREFLYER_ISA=base|v3|v4, read once, forces
// another. Throws Error(invalid) if its value is no such set, or a set that this processor does not run.
Isa isa();

// Returns the table of functions that was compiled for the instruction set named `set`. Returns null if there is no
// such set or this processor does not run it.
template <class Table>
const Table* table_for(const char* set, const Table& base, const Table& v3, const Table& v4) {
  const std::pair<Isa, const Table*> tables[] = {{Isa::base, &base}, {Isa::v3, &v3}, {Isa::v4, &v4}};
  for (const auto& [its, table] : tables) {
    if (std::strcmp(set, name(its)) == 0 && able(its)) return table;
  }
  return nullptr;
}

}  // namespace ff
