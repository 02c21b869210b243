// The main part of a CRC computation, by folding: carry-less products of more than 128 bits reduce a range of memory to
// 16 bytes with the same CRC. Folding works for any polynomial ("Fast CRC Computation for Generic Polynomials Using
// PCLMULQDQ Instruction", Gopal et al. 2009). Thread-safe; no state.
//
// Folding reads one stream of memory in order, which the hardware prefetcher follows. The CRC32 instruction on three
// streams is as fast on cached bytes, but reaches only a third of the speed on uncached bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/isa.hpp"

namespace ff {

// Remainders of x^(n + 32) and x^(n - 32) modulo a reflected polynomial, for a distance of n bits.
struct CrcFactors {
  struct Pair {
    std::uint64_t low, high;
  };
  Pair by2048, by512, by128;
};

// 16 bytes whose CRC, computed from register 0, equals the CRC of the folded bytes.
struct Folded {
  std::uint64_t low, high;
};

// Starts from the register `c`. REQUIRES: size >= 256 and a multiple of 64.
using CrcFold = Folded (*)(std::uint32_t c, const unsigned char* p, std::size_t size, const CrcFactors& factors);

// Returns the folding of an instruction set: 512 bits wide for v4, 256 for v3. Returns nullptr for base, or if this
// processor cannot fold at that width.
CrcFold crc_fold(Isa isa);
// Returns the width in bits of the carry-less products that this process's CRCs use: 512, 256 or 128.
int crc_width();

}  // namespace ff
