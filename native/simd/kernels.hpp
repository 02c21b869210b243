// Reduction kernels, one table per instruction set. Pure functions on memory: thread-safe, no state. They rely on a
// thread's initial floating-point mode: round to nearest, denormals kept.
#pragma once

#include <cstddef>
#include <cstdint>

#include "simd/dtype.hpp"

namespace ff::simd {

// For every element i: acc = src[0][i] op src[1][i] op ... in that order, times `scale` (sum, avg and product of
// floating types only; elsewhere it is ignored and must be 1), rounded once to the element type, to nearest even,
// and stored to every dst[k][i]. One pass: every source is read once, every destination written once.
//   f64 accumulates in f64; f32, f16, bf16 and f8 in f32. Integers wrap.
//   bool: any nonzero input counts as 1, results are 0 or 1; sum = max = bor, product = min = band.
//   min, max: the earlier source wins between equal values (so +0 and -0 keep their order); NaN beats all.
//   NaN: a result that is NaN is stored as the positive quiet NaN without payload (f64 0x7FF8000000000000,
//   f32 0x7FC00000, bf16 0x7FC0, f16 0x7E00, f8 0x7F), whatever sign and payload the inputs had.
//   Overflow: gives infinity. f8e4m3 has no infinity: overflow, and an infinite value, give its largest number, 448,
//   with the sign, as PyTorch 2.13 converts.
// With these rules all instruction sets give the same bits for all inputs.
// REQUIRES: srcs >= 1. A dst may be one of the srcs (in place); otherwise ranges must not overlap. Any alignment.
using ReduceFn = void (*)(void* const* dst, std::size_t dsts, const void* const* src, std::size_t srcs,
                          std::size_t count, double scale);

// Kernels of the codecs (codec.hpp). A tile is an array of floats, 64-byte aligned, that may be read and written up to
// the next multiple of kTileStep elements. Its elements past `count` must be 0 when it is read.
inline constexpr std::size_t kTileStep = 64;
inline constexpr std::size_t kInt8Block = 256;  // values that share a scale

struct CodecKernels {
  // y[i] = x[i] rounded to bf16 or f16, up or down at random: the random bits depend on seed and first + i alone.
  using Dither = void (*)(const float* x, std::size_t count, std::uint64_t seed, std::uint64_t first, float* y);
  Dither dither_bf16, dither_f16;
  // Tile to blocks of one f32 scale and kInt8Block signed bytes, and back; seed 0 rounds to nearest.
  void (*encode_int8)(const float* x, std::size_t count, std::uint64_t seed, std::uint64_t first, char* wire);
  void (*decode_int8)(const char* wire, std::size_t count, float* y);
  // residual[i] = x[i] - y[i], or 0 if that is not finite. `residual` is not a tile.
  void (*subtract)(const float* x, const float* y, std::size_t count, float* residual);
};

struct Kernels {
  const char* isa;                         // "base", "v3" (AVX2) or "v4" (AVX-512)
  ReduceFn reduce[kDTypes + 1][kOps + 1];  // nullptr if the combination has no meaning
  ReduceFn widen[kDTypes + 1];
  ReduceFn narrow[kDTypes + 1];
  CodecKernels codec;
};

// Returns the table of the instruction set in use (base/isa.hpp); throws what ff::isa() throws.
const Kernels& kernels();

// Returns the table of one instruction set, or nullptr if this processor lacks it.
const Kernels* kernels_for(const char* isa);

// Returns a kernel of the table in use; nullptr if the combination has no meaning: band, bor and bxor of floating
// types, avg of integers and bool.
ReduceFn reduce_kernel(DType dtype, Op op);
// Return kernels that sum f32, f16, bf16 or f8 (nullptr for other types) with f32 on one side. widen_kernel: sources
// of `dtype`, destinations f32, so that a partial sum stays unrounded. narrow_kernel: sources f32, destinations of
// `dtype`, rounded once.
// A destination may be a source only if the two types have the same size.
ReduceFn widen_kernel(DType dtype);
ReduceFn narrow_kernel(DType dtype);

}  // namespace ff::simd
