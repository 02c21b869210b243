// Wire codecs: values travel between hosts in fewer bytes, or unrounded. Pure functions on memory: thread-safe, no
// state. All instruction sets write the same bytes and read the same values.
//
// codec   wire                                  |decoded - x| at most, for finite x, rounding to nearest
// none    the values as they are, of any DType  0
// fp32    f32                                   0 (with a residual: the error of the f32 addition)
// bf16    bf16                                  2^-8 |x|, below 2^-126: 2^-134
// fp16    f16                                   2^-11 |x|, below 2^-14: 2^-25; from 65520 on: infinity
// int8    blocks of 256 values (the last may    absmax/254 (1 + 2^-14) with the block's absmax; blocks with an
//         be shorter): f32 scale, then one      absmax below 2^-119 travel as zeros
//         signed byte each, value = scale * q
// With stochastic rounding, the bounds are twice as large.
//
// int8: scale = absmax / 127. A block of zeros has scale 0. A block with an infinity or NaN has scale NaN, so that all
// of it decodes to NaN: the receiver notices, but loses the neighbouring values.
#pragma once

#include <cstddef>
#include <cstdint>

#include "simd/dtype.hpp"

namespace ff {

enum class Codec : std::uint8_t { none, fp32, bf16, fp16, int8 };

namespace simd {

// All codecs except `none` take f32, f16, bf16 and f8; all functions throw Error(invalid) for other types.

std::size_t encoded_bytes(Codec codec, DType dtype, std::size_t count);

// residual: error feedback, `count` floats that the caller keeps for the next encode of the same elements (zeros at
//   first): x = value + residual[i] is sent and residual[i] = x - decoded, or 0 where that is not finite. nullptr: x is
//   the value. `none` sends the values alone and leaves the residual as it is.
// seed: 0 rounds to nearest, ties to even. Any other seed rounds up or down at random, so that the mean over seeds is
//   x. The bits depend only on seed and element index. Stochastic rounding may round an x between the largest bf16 or
//   f16 and the next power of two to infinity.
void encode(Codec codec, DType dtype, const void* values, std::size_t count, void* wire, float* residual,
            std::uint64_t seed);

// values = decoded * scale, rounded once.
void decode(Codec codec, DType dtype, const void* wire, std::size_t count, void* values, double scale);

// values = (values + decoded) * scale, computed in f32 and rounded once.
void decode_add(Codec codec, DType dtype, const void* wire, std::size_t count, void* values, double scale);

}  // namespace simd
}  // namespace ff
