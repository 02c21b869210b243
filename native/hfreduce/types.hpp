// What one collective call is, as every rank must state it alike.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/error.hpp"
#include "simd/kernels.hpp"

namespace ff::hfreduce {

enum class DType : std::uint32_t { f32 = 1, f64 = 2, bf16 = 3 };
enum class ReduceOp : std::uint32_t { sum = 1, avg = 2 };

inline std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f64: return 8;
    case DType::bf16: return 2;
    default: return 4;
  }
}

inline simd::ReduceFn kernel_of(DType dtype) {
  const simd::Kernels& table = simd::kernels();
  switch (dtype) {
    case DType::f64: return table.sum_f64;
    case DType::bf16: return table.sum_bf16;
    default: return table.sum_f32;
  }
}

// The part of a call that must be equal on all ranks. Crosses the wire and shared memory as it is.
struct Call {
  std::uint64_t seq;    // number of the operation in its group
  std::uint64_t count;  // elements
  DType dtype;
  ReduceOp op;

  bool operator==(const Call&) const = default;
};

inline std::string to_string(const Call& call) {
  static constexpr const char* kTypes[] = {"?", "float32", "float64", "bfloat16"};
  const auto dtype = static_cast<std::uint32_t>(call.dtype);
  return std::string("allreduce #") + std::to_string(call.seq) + "(" +
         std::to_string(call.count) + " x " + kTypes[dtype <= 3 ? dtype : 0] + ", " +
         (call.op == ReduceOp::avg ? "avg" : "sum") + ")";
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
