// For tests: the short floating types by their definition, one value at a time, without code shared with the kernels.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "base/testing/check.hpp"
#include "simd/dtype.hpp"

namespace ff::simd::reference {

struct Format {
  int exponent_bits, mantissa_bits;
  // True: the codes of the highest exponent are infinity and NaN. False: they are numbers, but the last code is NaN.
  bool infinity;
  std::uint32_t quiet;  // the code of a stored NaN

  int bits() const { return 1 + exponent_bits + mantissa_bits; }
  int bias() const { return (1 << (exponent_bits - 1)) - 1; }

  // Returns the value that a code's fields give, without the sign. Treats codes of infinity and NaN like those of numbers.
  double plain(std::uint32_t code) const {
    const auto exponent = static_cast<int>(code >> mantissa_bits);
    const double fraction = std::ldexp(code & ((1u << mantissa_bits) - 1), -mantissa_bits);
    return exponent == 0 ? std::ldexp(fraction, 1 - bias()) : std::ldexp(1 + fraction, exponent - bias());
  }
  // Returns the first code beyond the finite ones.
  std::uint32_t end() const {
    return infinity ? ((1u << exponent_bits) - 1) << mantissa_bits : (1u << (bits() - 1)) - 1;
  }
};

inline Format format_of(DType dtype) {
  switch (dtype) {
    case DType::bf16: return {8, 7, true, 0x7FC0};
    case DType::f16: return {5, 10, true, 0x7E00};
    case DType::f8e4m3: return {4, 3, false, 0x7F};
    case DType::f8e5m2: return {5, 2, true, 0x7F};
    default: std::abort();
  }
}

class Short {
 public:
  explicit Short(DType dtype) : format(format_of(dtype)) {
    for (std::uint32_t code = 0; code <= format.end(); ++code) values_.push_back(format.plain(code));
  }

  float decode(std::uint32_t code) const {
    const std::uint32_t sign = code >> (format.bits() - 1);
    const std::uint32_t magnitude = code & ((1u << (format.bits() - 1)) - 1);
    double value = std::numeric_limits<double>::quiet_NaN();
    if (magnitude < format.end()) value = values_[magnitude];
    if (magnitude == format.end() && format.infinity) value = INFINITY;
    return static_cast<float>(sign != 0 ? -value : value);
  }

  // Returns the nearest code, the even one on a tie. The value after the largest number would need a higher code. A
  // float nearest to it has overflowed: to infinity, or to the largest number if there is no infinity.
  std::uint32_t encode(float x) const {
    if (std::isnan(x)) return format.quiet;
    const std::uint32_t sign = std::signbit(x) ? 1u << (format.bits() - 1) : 0;
    const double a = std::fabs(static_cast<double>(x));
    const auto above = std::lower_bound(values_.begin(), values_.end(), a);
    if (above == values_.end()) return sign | (format.infinity ? format.end() : format.end() - 1);
    auto code = static_cast<std::uint32_t>(above - values_.begin());
    if (code > 0) {
      const double up = *above - a, down = a - values_[code - 1];
      if (down < up || (down == up && code % 2 == 1)) --code;
    }
    return sign | (code == format.end() && !format.infinity ? code - 1 : code);
  }

  // Returns the float midway between the finite codes `code` and `code` + 1.
  float half_way(std::uint32_t code) const { return static_cast<float>((values_[code] + values_[code + 1]) / 2); }

  const Format format;

 private:
  std::vector<double> values_;
};

inline const Short& short_of(DType dtype) {
  static const Short types[] = {Short(DType::f16), Short(DType::bf16), Short(DType::f8e4m3), Short(DType::f8e5m2)};
  return types[static_cast<int>(dtype) - static_cast<int>(DType::f16)];
}

}  // namespace ff::simd::reference
