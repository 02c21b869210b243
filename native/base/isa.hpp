// The instruction sets that code is compiled for in several variants, and the one in use. Thread-safe; no state but
// what the first call finds.
#pragma once

namespace ff {

enum class Isa {
  base,  // x86-64, and where a processor has them SSE4.2 and PCLMULQDQ for CRCs
  v3,    // AVX2, and where a processor has it VPCLMULQDQ on 256 bits
  v4,    // AVX-512, and VPCLMULQDQ on 512 bits
};

const char* name(Isa isa);  // "base", "v3" or "v4"
bool able(Isa isa);         // this processor runs it

// The widest one that this processor runs. The environment's FIREFLYER_ISA=base|v3|v4, read once, forces another.
// Throws Error(invalid) if that is none, or none of this processor's.
Isa isa();

}  // namespace ff
