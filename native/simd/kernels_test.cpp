// Every instruction set gives the bits of a reference that follows the definitions, for all types and operations.
#include "simd/kernels.hpp"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <random>
#include <vector>

#include "base/testing/check.hpp"
#include "base/testing/one_thread.hpp"
#include "simd/reference.hpp"

using namespace ff;
using namespace ff::simd;
using reference::short_of;

namespace {

std::vector<const Kernels*> tables() {
  std::vector<const Kernels*> result;
  for (const char* isa : {"base", "v3", "v4"}) {
    if (const Kernels* table = kernels_for(isa)) result.push_back(table);
  }
  return result;
}

using Bytes = std::vector<unsigned char>;

template <class T>
T get(const unsigned char* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

// Combines a and b in this order. For min and max, the first of two equal values wins, and NaN beats all.
template <class F>
std::optional<F> combine_floats(Op op, F a, F b) {
  const F nan = std::numeric_limits<F>::quiet_NaN();
  switch (op) {
    case Op::sum:
    case Op::avg: return a + b;
    case Op::product: return a * b;
    case Op::min: return std::isnan(a) || std::isnan(b) ? nan : (b < a ? b : a);
    case Op::max: return std::isnan(a) || std::isnan(b) ? nan : (b > a ? b : a);
    default: return std::nullopt;
  }
}

template <class F>
F finish(Op op, F value, double scale) {
  return op == Op::min || op == Op::max ? value : static_cast<F>(value * static_cast<F>(scale));
}

template <class T>
std::optional<T> combine_integers(Op op, T a, T b) {
  const auto x = static_cast<std::uint64_t>(a), y = static_cast<std::uint64_t>(b);
  switch (op) {
    case Op::sum: return static_cast<T>(x + y);
    case Op::product: return static_cast<T>(x * y);
    case Op::min: return a < b ? a : b;
    case Op::max: return a > b ? a : b;
    case Op::band: return static_cast<T>(x & y);
    case Op::bor: return static_cast<T>(x | y);
    case Op::bxor: return static_cast<T>(x ^ y);
    default: return std::nullopt;
  }
}

float read_float(DType dtype, const unsigned char* p) {
  if (dtype == DType::f32) return get<float>(p);
  return short_of(dtype).decode(size_of(dtype) == 1 ? *p : get<std::uint16_t>(p));
}

void write_float(DType dtype, float value, unsigned char* p) {
  std::uint32_t code;
  if (dtype == DType::f32) {
    code = std::isnan(value) ? 0x7FC00000u : std::bit_cast<std::uint32_t>(value);
  } else {
    code = short_of(dtype).encode(value);
  }
  std::memcpy(p, &code, size_of(dtype));
}

template <class T>
bool reduce_integers(Op op, const std::vector<const unsigned char*>& at, unsigned char* out) {
  T acc = get<T>(at[0]);
  if (!combine_integers(op, acc, acc)) return false;
  for (std::size_t k = 1; k < at.size(); ++k) acc = *combine_integers(op, acc, get<T>(at[k]));
  std::memcpy(out, &acc, sizeof acc);
  return true;
}

// Computes one element of the result; false if the operation has no meaning.
bool reduce_one(DType from, DType to, Op op, const std::vector<const unsigned char*>& at, double scale,
                unsigned char* out) {
  switch (from) {
    case DType::i64: return reduce_integers<std::int64_t>(op, at, out);
    case DType::i32: return reduce_integers<std::int32_t>(op, at, out);
    case DType::i16: return reduce_integers<std::int16_t>(op, at, out);
    case DType::i8: return reduce_integers<std::int8_t>(op, at, out);
    case DType::u8: return reduce_integers<std::uint8_t>(op, at, out);
    case DType::boolean: {
      if (op == Op::avg) return false;
      std::size_t ones = 0;
      for (const unsigned char* p : at) ones += *p != 0;
      const bool any = op == Op::sum || op == Op::max || op == Op::bor;
      *out = op == Op::bxor ? ones % 2 : (any ? ones > 0 : ones == at.size());
      return true;
    }
    case DType::f64: {
      double acc = get<double>(at[0]);
      for (std::size_t k = 1; k < at.size(); ++k) {
        const auto next = combine_floats(op, acc, get<double>(at[k]));
        if (!next) return false;
        acc = *next;
      }
      acc = finish(op, acc, scale);
      const auto code = std::isnan(acc) ? 0x7FF8000000000000u : std::bit_cast<std::uint64_t>(acc);
      std::memcpy(out, &code, sizeof code);
      return combine_floats(op, acc, acc).has_value();
    }
    default: {
      float acc = read_float(from, at[0]);
      if (!combine_floats(op, acc, acc)) return false;
      for (std::size_t k = 1; k < at.size(); ++k) {
        acc = *combine_floats(op, acc, read_float(from, at[k]));
      }
      write_float(to, finish(op, acc, scale), out);
      return true;
    }
  }
}

// Runs `kernel` from and to odd addresses, into `dsts` destinations, the first of which is a source if `in_place`.
// Requires `expected` in all of them and no write beyond them.
void check(ReduceFn kernel, const std::vector<Bytes>& inputs, const Bytes& expected, std::size_t count,
           std::size_t dsts, bool in_place, double scale) {
  constexpr unsigned char kMark = 0xA5;
  std::vector<Bytes> sources, targets(dsts, Bytes(expected.size() + 2, kMark));
  std::vector<const void*> src;
  std::vector<void*> dst;
  for (const Bytes& input : inputs) {
    Bytes& copy = sources.emplace_back(1, kMark);
    copy.insert(copy.end(), input.begin(), input.end());
    copy.push_back(kMark);
  }
  for (const Bytes& source : sources) src.push_back(source.data() + 1);
  for (Bytes& target : targets) dst.push_back(target.data() + 1);
  if (in_place) dst[0] = sources.back().data() + 1;
  kernel(dst.data(), dsts, src.data(), src.size(), count, scale);
  for (std::size_t k = 0; k < dsts; ++k) {
    const Bytes& got = in_place && k == 0 ? sources.back() : targets[k];
    CHECK(got.front() == kMark && got.back() == kMark);
    CHECK(count == 0 || std::memcmp(got.data() + 1, expected.data(), expected.size()) == 0);
  }
  for (std::size_t k = 0; k + (in_place ? 1 : 0) < inputs.size(); ++k) {
    CHECK(count == 0 || std::memcmp(sources[k].data() + 1, inputs[k].data(), inputs[k].size()) == 0);
  }
}

class Inputs {
 public:
  // Random bits; for floating types also many values near each other, zeros, infinities and NaN.
  Bytes make(DType dtype, std::size_t count) {
    Bytes bytes(count * size_of(dtype));
    for (auto& byte : bytes) byte = static_cast<unsigned char>(random_());
    if (dtype == DType::boolean) {
      for (auto& byte : bytes) byte = random_() % 2 != 0 ? byte : 0;
    }
    if (!is_floating(dtype) || random_() % 2 == 0) return bytes;
    for (std::size_t i = 0; i < count; ++i) {
      static constexpr double kSpecial[] = {0.0, -0.0, INFINITY, -INFINITY, 1e-40, 65504, 448};
      const bool special = random_() % 8 == 0;
      const double value = special ? kSpecial[random_() % 7] : normal_(random_);
      unsigned char* p = bytes.data() + i * size_of(dtype);
      if (dtype == DType::f64) {
        std::memcpy(p, &value, sizeof value);
      } else {
        write_float(dtype, static_cast<float>(value), p);
      }
    }
    return bytes;
  }

 private:
  std::mt19937_64 random_{1};
  std::normal_distribution<double> normal_;
};

// Compares all tables with the reference for sources of `from` and destinations of `to`.
template <class Pick>
void compare(DType from, DType to, Op op, Pick pick) {
  static Inputs inputs;
  for (const std::size_t count : {0, 1, 15, 16, 17, 63, 64, 65, 300}) {
    for (const std::size_t srcs : {1, 2, 3, 8}) {
      std::vector<Bytes> sources;
      for (std::size_t k = 0; k < srcs; ++k) sources.push_back(inputs.make(from, count));
      for (const double scale : {1.0, 1.0 / 3}) {
        if (scale != 1.0 && !is_floating(from)) continue;
        Bytes expected(count * size_of(to));
        bool meaning = true;
        for (std::size_t i = 0; i < count && meaning; ++i) {
          std::vector<const unsigned char*> at;
          for (const Bytes& source : sources) at.push_back(source.data() + i * size_of(from));
          meaning = reduce_one(from, to, op, at, scale, expected.data() + i * size_of(to));
        }
        for (const Kernels* table : tables()) {
          const ReduceFn kernel = pick(*table);
          if (count > 0) CHECK((kernel != nullptr) == meaning);
          if (kernel == nullptr) continue;
          check(kernel, sources, expected, count, 1, false, scale);
          check(kernel, sources, expected, count, 3, size_of(from) == size_of(to), scale);
        }
      }
    }
  }
}

void every_type_and_operation() {
  for (std::uint32_t d = 1; d <= kDTypes; ++d) {
    for (std::uint32_t o = 1; o <= kOps; ++o) {
      const auto dtype = static_cast<DType>(d);
      compare(dtype, dtype, static_cast<Op>(o), [&](const Kernels& t) { return t.reduce[d][o]; });
    }
    const auto dtype = static_cast<DType>(d);
    if (!is_floating(dtype) || dtype == DType::f64) {
      CHECK(widen_kernel(dtype) == nullptr && narrow_kernel(dtype) == nullptr);
      continue;
    }
    compare(dtype, DType::f32, Op::sum, [&](const Kernels& t) { return t.widen[d]; });
    compare(DType::f32, dtype, Op::sum, [&](const Kernels& t) { return t.narrow[d]; });
  }
  CHECK(reduce_kernel(static_cast<DType>(0), Op::sum) == nullptr);
  CHECK(reduce_kernel(static_cast<DType>(kDTypes + 1), Op::sum) == nullptr);
  CHECK(reduce_kernel(DType::f32, static_cast<Op>(kOps + 1)) == nullptr);
  CHECK(reduce_kernel(DType::f32, Op::sum) == kernels().reduce[1][1]);
}

template <class To, class From>
std::vector<To> convert(ReduceFn kernel, const std::vector<From>& from) {
  std::vector<To> to(from.size());
  void* dst = to.data();
  const void* src = from.data();
  kernel(&dst, 1, &src, 1, from.size(), 1.0);
  return to;
}

// Converts all codes to f32. Converts to codes: the value of every code, the midpoint of each two neighbours, the floats
// next to the midpoint, and random floats.
template <class Code>
void every_code(DType dtype) {
  const reference::Short& type = short_of(dtype);
  std::vector<Code> codes;
  std::vector<float> values = {INFINITY, -INFINITY, NAN, -NAN, 3e38f, -3e38f, 1e-45f, 500, 480, 464};
  for (std::uint32_t c = 0; c < 1u << type.format.bits(); ++c) {
    codes.push_back(static_cast<Code>(c));
    values.push_back(type.decode(c));
  }
  for (std::uint32_t c = 0; c < type.format.end(); ++c) {
    for (const float sign : {1.0f, -1.0f}) {
      const float middle = sign * type.half_way(c);
      values.insert(values.end(), {middle, std::nextafter(middle, INFINITY), std::nextafter(middle, -INFINITY)});
    }
  }
  std::mt19937 random(2);
  for (int i = 0; i < 100000; ++i) {
    values.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(random())));
  }
  std::vector<Code> expected;
  for (const float value : values) expected.push_back(static_cast<Code>(type.encode(value)));
  const auto row = static_cast<std::size_t>(dtype);
  for (const Kernels* table : tables()) {
    const auto wide = convert<float>(table->widen[row], codes);
    for (std::size_t c = 0; c < codes.size(); ++c) {
      const float value = type.decode(codes[c]);
      CHECK(std::bit_cast<std::uint32_t>(wide[c]) ==
            (std::isnan(value) ? 0x7FC00000u : std::bit_cast<std::uint32_t>(value)));
    }
    CHECK(convert<Code>(table->narrow[row], values) == expected);
  }
}

// A few codes by hand, to validate the reference itself.
void known_codes() {
  const auto& e4m3 = short_of(DType::f8e4m3);
  CHECK(e4m3.decode(0x7E) == 448 && std::isnan(e4m3.decode(0x7F)) && std::isnan(e4m3.decode(0xFF)));
  CHECK(e4m3.decode(0x01) == 0x1p-9f && e4m3.decode(0x08) == 0x1p-6f && e4m3.decode(0xB8) == -1);
  CHECK(e4m3.encode(464) == 0x7E && e4m3.encode(1000) == 0x7E && e4m3.encode(-INFINITY) == 0xFE);
  const auto& e5m2 = short_of(DType::f8e5m2);
  CHECK(e5m2.decode(0x7B) == 57344 && std::isinf(e5m2.decode(0x7C)) && std::isnan(e5m2.decode(0x7D)));
  CHECK(e5m2.encode(61439) == 0x7B && e5m2.encode(61440) == 0x7C && e5m2.encode(0x1p-16f) == 0x01);
  const auto& f16 = short_of(DType::f16);
  CHECK(f16.encode(65519) == 0x7BFF && f16.encode(65520) == 0x7C00 && f16.encode(1) == 0x3C00);
  const auto& bf16 = short_of(DType::bf16);
  CHECK(bf16.encode(1) == 0x3F80 && bf16.encode(1 + 0x1p-8f) == 0x3F80 && bf16.encode(1 + 0x3p-8f) == 0x3F82);
}

}  // namespace

int main() {
  known_codes();
  every_code<std::uint16_t>(DType::f16);
  every_code<std::uint16_t>(DType::bf16);
  every_code<std::uint8_t>(DType::f8e4m3);
  every_code<std::uint8_t>(DType::f8e5m2);
  every_type_and_operation();
}
