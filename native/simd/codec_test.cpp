// Tests codecs against their definitions, in one process per instruction set. All instruction sets must write the same
// bytes.
#include "simd/codec.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "base/error.hpp"
#include "base/testing/check.hpp"
#include "base/testing/one_thread.hpp"
#include "simd/kernels.hpp"
#include "simd/reference.hpp"

using namespace ff;
using namespace ff::simd;
using reference::short_of;

namespace {

constexpr Codec kLossy[] = {Codec::bf16, Codec::fp16, Codec::int8};
constexpr DType kTypes[] = {DType::f32, DType::f16, DType::bf16, DType::f8e4m3, DType::f8e5m2};
constexpr std::size_t kBlock = 256;

// FNV-1a over all written bytes; main() compares the digests of all instruction sets.
std::uint64_t digest = 0xCBF29CE484222325u;

void note(const void* data, std::size_t bytes) {
  const auto* p = static_cast<const unsigned char*>(data);
  for (std::size_t i = 0; i < bytes; ++i) digest = (digest ^ p[i]) * 0x100000001B3u;
}

using Bytes = std::vector<unsigned char>;

Bytes from_floats(DType dtype, const std::vector<float>& values) {
  Bytes bytes(values.size() * size_of(dtype));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::uint32_t code =
        dtype == DType::f32 ? std::bit_cast<std::uint32_t>(values[i]) : short_of(dtype).encode(values[i]);
    std::memcpy(bytes.data() + i * size_of(dtype), &code, size_of(dtype));
  }
  return bytes;
}

std::vector<float> to_floats(DType dtype, const Bytes& bytes) {
  std::vector<float> values(bytes.size() / size_of(dtype));
  for (std::size_t i = 0; i < values.size(); ++i) {
    std::uint32_t code = 0;
    std::memcpy(&code, bytes.data() + i * size_of(dtype), size_of(dtype));
    values[i] = dtype == DType::f32 ? std::bit_cast<float>(code) : short_of(dtype).decode(code);
  }
  return values;
}

Bytes encoded(Codec codec, DType dtype, const Bytes& values, float* residual, std::uint64_t seed) {
  const std::size_t count = values.size() / size_of(dtype);
  Bytes wire(encoded_bytes(codec, dtype, count) + 1, 0xA5);
  encode(codec, dtype, values.data(), count, wire.data(), residual, seed);
  CHECK(wire.back() == 0xA5);
  wire.pop_back();
  note(wire.data(), wire.size());
  if (residual != nullptr) note(residual, count * sizeof(float));
  return wire;
}

// Decodes to f32, which represents every codec's values exactly.
std::vector<float> decoded(Codec codec, const Bytes& wire, std::size_t count) {
  std::vector<float> values(count);
  decode(codec, DType::f32, wire.data(), count, values.data(), 1.0);
  note(values.data(), count * sizeof(float));
  return values;
}

std::vector<float> sent(Codec codec, const std::vector<float>& x, std::uint64_t seed = 0) {
  return decoded(codec, encoded(codec, DType::f32, from_floats(DType::f32, x), nullptr, seed), x.size());
}

bool same(float a, float b) {
  return (std::isnan(a) && std::isnan(b)) || std::bit_cast<int>(a) == std::bit_cast<int>(b);
}

float absmax_of_block(const std::vector<float>& x, std::size_t i) {
  float most = 0;
  const std::size_t begin = i / kBlock * kBlock;
  for (std::size_t j = begin; j < std::min(begin + kBlock, x.size()); ++j) {
    most = std::max(most, std::fabs(x[j]));
  }
  return most;
}

// Returns the bound of codec.hpp for finite x[i].
double bound(Codec codec, const std::vector<float>& x, std::size_t i) {
  const double a = std::fabs(x[i]);
  if (codec == Codec::bf16) return std::max(0x1p-8 * a, 0x1p-134);
  if (codec == Codec::fp16) return std::max(0x1p-11 * a, 0x1p-25);
  const double absmax = absmax_of_block(x, i);
  return absmax < 0x1p-119 ? absmax : absmax / 254 * (1 + 0x1p-14);
}

std::vector<float> random_values(std::size_t count, unsigned seed, double spread) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal, exponent(0, spread);
  std::vector<float> values(count);
  for (auto& value : values) {
    value = static_cast<float>(normal(random) * std::exp2(std::round(exponent(random))));
  }
  return values;
}

void sizes() {
  CHECK(encoded_bytes(Codec::none, DType::i64, 3) == 24);
  CHECK(encoded_bytes(Codec::fp32, DType::bf16, 3) == 12);
  CHECK(encoded_bytes(Codec::bf16, DType::f32, 3) == 6 && encoded_bytes(Codec::fp16, DType::f32, 0) == 0);
  CHECK(encoded_bytes(Codec::int8, DType::f32, 0) == 0);
  CHECK(encoded_bytes(Codec::int8, DType::f32, 1) == 5);
  CHECK(encoded_bytes(Codec::int8, DType::f16, 256) == 260);
  CHECK(encoded_bytes(Codec::int8, DType::f32, 257) == 265);
}

// fp32 and none lose nothing; bf16 and fp16 give the nearest values; int8 errs by at most the bound of codec.hpp.
void nearest() {
  for (const std::size_t count : {0, 1, 5, 64, 255, 256, 257, 2048, 5000}) {
    for (const double spread : {0.0, 4.0, 25.0}) {
      const auto x = random_values(count, static_cast<unsigned>(count + 1), spread);
      CHECK(sent(Codec::fp32, x) == x && sent(Codec::none, x) == x);
      for (const Codec codec : kLossy) {
        const auto y = sent(codec, x);
        for (std::size_t i = 0; i < count; ++i) {
          if (codec == Codec::int8) {
            CHECK(std::fabs(static_cast<double>(x[i]) - y[i]) <= bound(codec, x, i));
            continue;
          }
          const auto& type = short_of(codec == Codec::bf16 ? DType::bf16 : DType::f16);
          CHECK(same(y[i], type.decode(type.encode(x[i]))));
          if (!std::isinf(y[i])) CHECK(std::fabs(x[i] - y[i]) <= bound(codec, x, i));
        }
      }
    }
  }
}

void int8_blocks() {
  std::vector<float> x(4 * kBlock + 7, 0.0f);
  x[kBlock + 3] = std::numeric_limits<float>::max();
  x[kBlock + 4] = -x[kBlock + 3];
  x[2 * kBlock + 200] = INFINITY;
  x[3 * kBlock] = 0x1p-120f;
  x[4 * kBlock + 6] = NAN;
  const Bytes wire = encoded(Codec::int8, DType::f32, from_floats(DType::f32, x), nullptr, 0);
  const auto y = decoded(Codec::int8, wire, x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    const std::size_t block = i / kBlock;
    if (block == 0 || block == 3) CHECK(y[i] == 0);
    if (block == 1) CHECK(std::isfinite(y[i]) && std::fabs(x[i] - y[i]) <= bound(Codec::int8, x, i));
    if (block == 2 || block == 4) CHECK(std::isnan(y[i]));
  }
  // The layout, written by hand: the f32 scale, then the bytes.
  const std::vector<float> ramp = {127, -127, 0, 1, -64};
  const Bytes small = encoded(Codec::int8, DType::f32, from_floats(DType::f32, ramp), nullptr, 0);
  float scale;
  std::memcpy(&scale, small.data(), sizeof scale);
  CHECK(std::fabs(scale - 1) < 1e-6f);
  const signed char expected[] = {127, -127, 0, 1, -64};
  CHECK(std::memcmp(small.data() + 4, expected, 5) == 0);
}

// Results lie within a step of x and of each other, so they are the two neighbours of x; the mean over seeds is x.
void stochastic() {
  constexpr std::size_t kSeeds = 2000;
  std::vector<float> x = random_values(300, 7, 2.0);
  x[0] = 1.0f;         // on the grid of bf16 and fp16: must stay
  x[1] = -0x1.8p-20f;  // a denormal f16
  x[2] = 0x1p-26f;     // a quarter of the smallest f16
  for (const Codec codec : kLossy) {
    std::vector<double> sum(x.size()), low(x.size(), INFINITY), high(x.size(), -INFINITY);
    for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
      const auto y = sent(codec, x, seed * 0x9E3779B97F4A7C15u);
      for (std::size_t i = 0; i < x.size(); ++i) {
        sum[i] += y[i];
        low[i] = std::min<double>(low[i], y[i]);
        high[i] = std::max<double>(high[i], y[i]);
      }
    }
    double worst = 0, total = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double step = 2 * bound(codec, x, i);
      CHECK(low[i] > x[i] - step && high[i] < x[i] + step && high[i] - low[i] <= step * (1 + 1e-6));
      // The mean of coin tosses between neighbours has a standard deviation of at most step / 2 / sqrt(n).
      const double off = (sum[i] / kSeeds - x[i]) / (step / 2 / std::sqrt(double{kSeeds}));
      worst = std::max(worst, std::fabs(off));
      total += off;
    }
    CHECK(worst < 5);
    CHECK(std::fabs(total) / std::sqrt(static_cast<double>(x.size())) < 5);
    if (codec != Codec::int8) CHECK(low[0] == 1 && high[0] == 1);
    if (codec == Codec::fp16) CHECK(low[2] == 0 && high[2] == 0x1p-24);
  }
}

// The random bits depend on the element's number and the seed: a shorter call gives a prefix of the same bits.
void stochastic_bits() {
  const std::vector<float> x(6000, 1 + 0x1p-12f);
  const std::vector<float> prefix(x.begin(), x.begin() + 2500);
  for (const Codec codec : {Codec::bf16, Codec::fp16}) {
    const auto y = sent(codec, x, 5), again = sent(codec, x, 5), other = sent(codec, x, 6);
    const auto part = sent(codec, prefix, 5);
    CHECK(y == again && y != other);
    CHECK(std::equal(part.begin(), part.end(), y.begin()));
    CHECK(!std::equal(y.begin(), y.begin() + 256, y.begin() + 256));
    CHECK(!std::equal(y.begin(), y.begin() + 2048, y.begin() + 2048));
    const auto up = static_cast<double>(std::count_if(y.begin(), y.end(), [](float v) { return v > 1; }));
    const double p = codec == Codec::bf16 ? 0x1p-5 : 0x1p-2;
    CHECK(std::fabs(up / 6000 - p) < 5 * std::sqrt(p * (1 - p) / 6000));
  }
}

// A residual not sent now is sent later: over many rounds the received sum equals the input sum.
void error_feedback() {
  constexpr int kRounds = 100;
  for (const DType dtype : kTypes) {
    for (const Codec codec : kLossy) {
      for (const std::uint64_t seed : {0u, 9u}) {
        const Bytes values = from_floats(dtype, random_values(2500, 3, 1.0));
        const auto value = to_floats(dtype, values);
        std::vector<float> residual(value.size());
        std::vector<double> total(value.size());
        for (int round = 0; round < kRounds; ++round) {
          std::vector<float> x(value.size());
          for (std::size_t i = 0; i < x.size(); ++i) x[i] = value[i] + residual[i];
          const Bytes wire = encoded(codec, dtype, values, residual.data(), seed == 0 ? 0 : seed + round);
          const auto y = decoded(codec, wire, value.size());
          for (std::size_t i = 0; i < y.size(); ++i) {
            CHECK(same(residual[i], x[i] - y[i]));
            total[i] += y[i];
          }
        }
        for (std::size_t i = 0; i < value.size(); ++i) {
          const double expected = double{value[i]} * kRounds - residual[i];
          CHECK(std::fabs(total[i] - expected) <= 1e-4 * (1 + std::fabs(expected)));
        }
      }
    }
  }
  // A value that is not finite once decoded leaves no residual.
  const Bytes bad = from_floats(DType::f32, {INFINITY, NAN, 1e30f, 1 + 0x1p-12f});
  std::vector<float> residual(4);
  encoded(Codec::fp16, DType::f32, bad, residual.data(), 0);
  CHECK(residual[0] == 0 && residual[1] == 0 && residual[2] == 0 && residual[3] == 0x1p-12f);
}

// decode and decode_add round once to the type, after the scale. This also holds for none and fp32.
void decode_and_add() {
  for (const DType dtype : kTypes) {
    for (const Codec codec : {Codec::none, Codec::fp32, Codec::bf16, Codec::fp16, Codec::int8}) {
      for (const std::size_t count : {1, 63, 257, 3000}) {
        const Bytes theirs = from_floats(dtype, random_values(count, 11, 2.0));
        const Bytes ours = from_floats(dtype, random_values(count, 12, 2.0));
        const Bytes wire = encoded(codec, dtype, theirs, nullptr, 0);
        const auto d = codec == Codec::none ? to_floats(dtype, wire) : decoded(codec, wire, count);
        const auto v = to_floats(dtype, ours);
        for (const double scale : {1.0, 1.0 / 3}) {
          std::vector<float> product(count), sum(count);
          for (std::size_t i = 0; i < count; ++i) {
            product[i] = d[i] * static_cast<float>(scale);
            sum[i] = (v[i] + d[i]) * static_cast<float>(scale);
          }
          Bytes got(ours.size());
          decode(codec, dtype, wire.data(), count, got.data(), scale);
          CHECK(got == from_floats(dtype, product));
          got = ours;
          decode_add(codec, dtype, wire.data(), count, got.data(), scale);
          CHECK(got == from_floats(dtype, sum));
        }
      }
    }
  }
}

template <class Call>
bool refuses(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.code() == Code::invalid;
  }
  return false;
}

void refusals() {
  double value = 0;
  for (const Codec codec : kLossy) {
    for (const DType dtype : {DType::f64, DType::i32, DType::boolean}) {
      CHECK(refuses([&] { encoded_bytes(codec, dtype, 1); }));
      CHECK(refuses([&] { encode(codec, dtype, &value, 1, &value, nullptr, 0); }));
      CHECK(refuses([&] { decode(codec, dtype, &value, 1, &value, 1.0); }));
      CHECK(refuses([&] { decode_add(codec, dtype, &value, 1, &value, 1.0); }));
    }
  }
  CHECK(refuses([&] { encoded_bytes(static_cast<Codec>(5), DType::f32, 1); }));
  CHECK(refuses([&] { encoded_bytes(Codec::none, static_cast<DType>(0), 1); }));
}

std::uint64_t run() {
  sizes();
  nearest();
  int8_blocks();
  stochastic();
  stochastic_bits();
  error_feedback();
  decode_and_add();
  refusals();
  return digest;
}

// Returns the digest of a run in a child process, where FIREFLYER_ISA picks the table.
std::uint64_t run_with(const char* isa) {
  int ends[2];
  CHECK(pipe(ends) == 0);
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    setenv("FIREFLYER_ISA", isa, 1);
    const std::uint64_t result = run();
    CHECK(std::strcmp(kernels().isa, isa) == 0);
    CHECK(write(ends[1], &result, sizeof result) == sizeof result);
    std::_Exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  std::uint64_t result = 0;
  CHECK(read(ends[0], &result, sizeof result) == sizeof result);
  close(ends[0]);
  close(ends[1]);
  return result;
}

}  // namespace

int main() {
  const std::uint64_t base = run_with("base");
  for (const char* isa : {"v3", "v4"}) {
    if (kernels_for(isa) != nullptr) CHECK(run_with(isa) == base);
  }
}
