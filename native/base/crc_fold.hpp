// The middle of a CRC by carry-less products of more than 128 bits ("Fast CRC Computation for Generic Polynomials Using
// PCLMULQDQ Instruction", Gopal et al. 2009): memory is folded onto its last bytes, whatever the polynomial.
// Thread-safe; no state.
//
// Fewer lanes and a longer way: a fold reads one stream of memory in order, which the processor fetches ahead. Three
// streams of the CRC32 instruction reach the same speed on bytes in the cache, a third of it on others.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/isa.hpp"

namespace ff {

// Of a reflected polynomial: the remainders of x^(n + 32) and x^(n - 32), for n bits.
struct CrcFactors {
  struct Pair {
    std::uint64_t low, high;
  };
  Pair by2048, by512, by128;
};

// 16 bytes whose CRC, begun with register 0, is that of what was folded.
struct Folded {
  std::uint64_t low, high;
};

// Begins with the register `c`. REQUIRES: size >= 256 and a multiple of 64.
using CrcFold = Folded (*)(std::uint32_t c, const unsigned char* p, std::size_t size, const CrcFactors& factors);

// The one of an instruction set: 512 bits wide for v4, 256 for v3; nullptr for base, or if this processor has none.
CrcFold crc_fold(Isa isa);
// Bits of the carry-less products that CRCs of this process use: 512, 256 or 128.
int crc_width();

}  // namespace ff
