// What one collective call is, as every rank must state it alike.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/error.hpp"
#include "simd/kernels.hpp"

namespace ff::hfreduce {

using ff::DType;
using ff::size_of;
using ReduceOp = ff::Op;

// Of a sum; an average is a sum with a scale.
inline simd::ReduceFn kernel_of(DType dtype) { return simd::reduce_kernel(dtype, Op::sum); }

// The part of a call that must be equal on all ranks. Crosses the wire and shared memory as it is.
struct Call {
  std::uint64_t seq;    // number of the operation in its group
  std::uint64_t count;  // elements
  DType dtype;
  ReduceOp op;

  bool operator==(const Call&) const = default;
};

inline std::string to_string(const Call& call) {
  return std::string("allreduce #") + std::to_string(call.seq) + "(" +
         std::to_string(call.count) + " x " + name_of(call.dtype) + ", " + name_of(call.op) + ")";
}

// Where slice `index` of `parts` begins in `count` elements; slices begin on cache lines of the tensor.
inline std::size_t slice_begin(std::size_t count, DType dtype, std::size_t index,
                               std::size_t parts) {
  const std::size_t line = 64 / size_of(dtype);
  const std::size_t lines = (count + line - 1) / line;
  const std::size_t begin = lines * index / parts * line;
  return begin < count ? begin : count;
}

}  // namespace ff::hfreduce
