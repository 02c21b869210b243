// Reduction kernels, one table an instruction set. Pure functions on memory: thread-safe, no state.
#pragma once

#include <cstddef>

#include "simd/dtype.hpp"

namespace ff::simd {

// For every element i: acc = src[0][i] + src[1][i] + ... in that order, times `scale`, rounded once to the
// element type and stored to every dst[k][i]. f64 accumulates in f64, all others in f32.
// A dst may be one of the srcs (in place); otherwise ranges must not overlap. No alignment is required.
using ReduceFn = void (*)(void* const* dst, std::size_t dsts, const void* const* src,
                          std::size_t srcs, std::size_t count, double scale);

struct Kernels {
  const char* isa;  // "base", "v3" (AVX2) or "v4" (AVX-512)
  ReduceFn sum_f32;
  ReduceFn sum_f64;
  ReduceFn sum_bf16;
};

// The table for this processor, picked once; FIREFLYER_ISA=base|v3|v4 forces one (an error if the processor
// lacks it or the name is unknown).
const Kernels& kernels();

ReduceFn reduce_kernel(DType dtype, Op op);

// The table of one instruction set, or nullptr if this processor lacks it.
const Kernels* kernels_for(const char* isa);

}  // namespace ff::simd
