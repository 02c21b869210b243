// Element types and reduction operations of kernels, codecs and the collective engine.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ff {

enum class DType : std::uint32_t {
  f32 = 1,
  f64,
  f16,
  bf16,
  f8e4m3,
  f8e5m2,
  i64,
  i32,
  i16,
  i8,
  u8,
  boolean,
};
inline constexpr std::uint32_t kDTypes = 12;

enum class Op : std::uint32_t { sum = 1, avg, min, max, product, band, bor, bxor };
inline constexpr std::uint32_t kOps = 8;

inline std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
    case DType::i64: return 8;
    case DType::f32:
    case DType::i32: return 4;
    case DType::f16:
    case DType::bf16:
    case DType::i16: return 2;
    default: return 1;
  }
}

inline bool is_floating(DType dtype) { return dtype <= DType::f8e5m2; }

inline const char* name_of(DType dtype) {
  static constexpr const char* kNames[] = {"?",           "float32", "float64", "float16", "bfloat16", "float8_e4m3fn",
                                           "float8_e5m2", "int64",   "int32",   "int16",   "int8",     "uint8",
                                           "bool"};
  const auto i = static_cast<std::uint32_t>(dtype);
  return kNames[i <= kDTypes ? i : 0];
}

inline const char* name_of(Op op) {
  static constexpr const char* kNames[] = {"?", "sum", "avg", "min", "max", "product", "band", "bor", "bxor"};
  const auto i = static_cast<std::uint32_t>(op);
  return kNames[i <= kOps ? i : 0];
}

}  // namespace ff
