// Kernels against their definitions for f32; all instruction sets write the same bytes for every type.
#include "nn/kernels.hpp"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "base/testing/check.hpp"
#include "base/testing/one_thread.hpp"
#include "nn/pool.hpp"

namespace {

using namespace ff::nn;
using Bytes = std::vector<std::uint8_t>;

std::vector<float> numbers(std::size_t count) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0, 4);
  std::vector<float> found(count);
  for (float& x : found) x = normal(random);
  const float special[] = {
      0.0f,   -0.0f,  std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(), 6.0f,
      1e-42f, -1e-42f};
  for (std::size_t i = 0; i < count && i < 7; ++i) found[i] = special[i];
  return found;
}

std::size_t words(std::size_t count) { return (count + 63) / 64 * 8; }

bool same(float a, float b) { return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b); }

void activations(const Kernels& table, std::size_t count) {
  const std::vector<float> x = numbers(count);
  std::vector<float> y(count), dx(count);
  Bytes bits(words(count));
  for (const auto kind : {Activation::relu, Activation::relu6, Activation::leaky}) {
    table.forward[static_cast<std::size_t>(kind)][0](x.data(), y.data(), bits.data(), count, 0.5);
    const bool leaky = kind == Activation::leaky;
    (leaky ? table.leak : table.select)[0](x.data(), bits.data(), dx.data(), count, 0.5);
    for (std::size_t i = 0; i < count; ++i) {
      const bool passes = x[i] > 0 && (kind != Activation::relu6 || x[i] < 6);
      const float low = leaky ? x[i] * 0.5f : x[i] < 0 ? 0.0f : x[i];
      CHECK(same(y[i], passes ? x[i] : x[i] > 0 ? 6.0f : low));
      CHECK((bits[i / 8] >> i % 8 & 1) == (passes ? 1 : 0));
      CHECK(same(dx[i], passes ? x[i] : leaky ? x[i] * 0.5f : 0.0f));
    }
  }
}

void dropout(const Kernels& table) {
  constexpr std::size_t kCount = 100'000;
  const std::vector<float> ones(kCount, 1.0f);
  std::vector<float> whole(kCount), parts(kCount);
  const auto drop = table.dropout[0];
  drop(ones.data(), whole.data(), kCount, 42, 0, 1u << 30, 2.0);
  drop(ones.data(), parts.data(), 640, 42, 0, 1u << 30, 2.0);
  drop(ones.data() + 640, parts.data() + 640, kCount - 640, 42, 640, 1u << 30, 2.0);
  CHECK(whole == parts);
  std::size_t dropped = 0;
  for (const float y : whole) {
    CHECK(y == 0 || y == 2);
    dropped += y == 0;
  }
  CHECK(std::abs(static_cast<double>(dropped) - kCount / 4.0) < 600);  // over four standard deviations
}

void product(const Kernels& table) {
  constexpr std::size_t kRows = 7, kPanels = 3, kPlanesA = 2, kPlanesB = 3;
  for (const std::size_t count : {std::size_t{1}, std::size_t{16}, std::size_t{40}}) {
    std::mt19937_64 random(count);
    std::vector<std::uint64_t> a(kPlanesA * kRows * count), b(kPlanesB * kPanels * count * kPanel);
    for (auto& word : a) word = random();
    for (auto& word : b) word = random() | random();
    std::vector<std::int32_t> out(kRows * kPanels * kPanel);
    table.bit_product(a.data(), kPlanesA, kRows, b.data(), kPlanesB, kRows, kPanels, count, out.data());
    for (std::size_t m = 0; m < kRows; ++m) {
      for (std::size_t n = 0; n < kPanels * kPanel; ++n) {
        std::int64_t expected = 0;
        for (std::size_t i = 0; i < kPlanesA; ++i) {
          for (std::size_t j = 0; j < kPlanesB; ++j) {
            for (std::size_t w = 0; w < count; ++w) {
              const std::uint64_t left = a[(i * kRows + m) * count + w];
              const std::uint64_t right = b[((j * kPanels + n / kPanel) * count + w) * kPanel + n % kPanel];
              expected += std::int64_t{std::popcount(left & right)} << (i + j);
            }
          }
        }
        CHECK(out[m * kPanels * kPanel + n] == expected);
      }
    }
  }
}

// Random bytes that are no NaN in any type: the second highest bit of each element is 0.
Bytes finite(std::size_t count, std::size_t size) {
  std::mt19937 random(3);
  Bytes found(count * size);
  for (std::size_t i = 0; i < found.size(); ++i) {
    found[i] = static_cast<std::uint8_t>(random());
    if (i % size == size - 1) found[i] &= 0xBF;
  }
  return found;
}

void same_bytes(const Kernels& one, const Kernels& other) {
  constexpr std::size_t kCount = 1003;
  for (std::size_t type = 0; type < kFloats; ++type) {
    const std::size_t size = size_of(static_cast<Float>(type));
    const Bytes x = finite(kCount, size);
    Bytes y[2], bits[2];
    for (std::size_t kind = 0; kind < kActivations; ++kind) {
      for (int which = 0; which < 2; ++which) {
        const Kernels& table = which ? other : one;
        y[which].assign(x.size(), 0), bits[which].assign(words(kCount), 0);
        table.forward[kind][type](x.data(), y[which].data(), bits[which].data(), kCount, 0.01);
        table.leak[type](y[which].data(), bits[which].data(), y[which].data(), kCount, 0.3);
        table.select[type](y[which].data(), bits[which].data(), y[which].data(), kCount, 0);
        table.dropout[type](y[which].data(), y[which].data(), kCount, 9, 0, 1u << 29, 1.1);
      }
      CHECK(y[0] == y[1] && std::memcmp(bits[0].data(), bits[1].data(), kCount / 8) == 0);
    }
  }
}

// Returns the bytes of all outputs of an RMS norm and of its gradients, for one type.
Bytes norm_bytes(const Kernels& table, std::size_t type, const Bytes& x, const Bytes& residual) {
  constexpr std::size_t kRows = 3, kWidth = 1103;
  const std::size_t size = size_of(static_cast<Float>(type)), inner = size < 4 ? 4 : size;
  const std::size_t bytes = kRows * kWidth * size;
  Bytes h(bytes), y(bytes), scales(kRows * inner), dh(bytes), apart(bytes), products(kRows * kWidth * inner);
  table.rms_norm[type]({x.data(), residual.data(), x.data(), h.data(), y.data(), scales.data()}, kRows, kWidth, 1e-5);
  const NormBackward to{h.data(), x.data(),  scales.data(), residual.data(),
                        x.data(), dh.data(), nullptr,       products.data()};
  table.rms_norm_backward[type](to, kRows, kWidth);
  NormBackward in_two = to;
  in_two.gh = nullptr, in_two.dh = y.data(), in_two.apart = apart.data();
  Bytes all(h);
  all.insert(all.end(), y.begin(), y.end());
  table.rms_norm_backward[type](in_two, kRows, kWidth);
  for (const Bytes* part : {&y, &scales, &dh, &apart, &products}) all.insert(all.end(), part->begin(), part->end());
  return all;
}

// Small numbers of a type, so that no sum overflows.
Bytes small(std::size_t count, std::size_t type, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal(0, 2);
  const std::size_t size = size_of(static_cast<Float>(type));
  Bytes found(count * size);
  for (std::size_t i = 0; i < count; ++i) {
    const double wide = normal(random);
    const float narrow = static_cast<float>(wide);
    if (size == 8) std::memcpy(&found[i * 8], &wide, 8);
    if (size == 4) std::memcpy(&found[i * 4], &narrow, 4);
    // The upper half of a float32 is a bfloat16. Read as a float16 with the top bit of the exponent cleared, it is a
    // number below 2.
    const unsigned mask = type == 2 ? 0xBFFF : 0xFFFF;
    const auto half = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(narrow) >> 16 & mask);
    if (size == 2) std::memcpy(&found[i * 2], &half, 2);
  }
  return found;
}

void fused_operators(const Kernels& one, const Kernels& other) {
  constexpr std::size_t kCount = 3 * 1103, kWhole = 3264;
  for (std::size_t type = 0; type < kFloats; ++type) {
    const Bytes x = small(kCount, type, 1), b = small(kCount, type, 2);
    CHECK(norm_bytes(one, type, x, b) == norm_bytes(other, type, x, b));
    if (one.swiglu[type] == nullptr) continue;
    Bytes y[2], da[2], db[2];
    for (int which = 0; which < 2; ++which) {
      const Kernels& table = which ? other : one;
      for (Bytes* each : {&y[which], &da[which], &db[which]}) each->assign(x.size(), 0);
      table.swiglu[type](x.data(), b.data(), y[which].data(), kCount, kWhole);
      table.swiglu_backward[type](b.data(), x.data(), y[which].data(), da[which].data(), db[which].data(), kCount,
                                  kWhole);
    }
    CHECK(y[0] == y[1] && da[0] == da[1] && db[0] == db[1]);
  }
}

void norm_of_known_rows(const Kernels& table) {
  const std::vector<float> x{3, 4, 3, 4}, weight{1, 2, 1, 2}, ones(4, 1);
  std::vector<float> y(4), scales(1), dh(4), products(4);
  table.rms_norm[0]({x.data(), nullptr, weight.data(), nullptr, y.data(), scales.data()}, 1, 4, 0);
  CHECK(std::abs(scales[0] - 1 / std::sqrt(12.5f)) < 1e-6f && std::abs(y[1] - 8 * scales[0]) < 1e-6f);
  const NormBackward to{x.data(), weight.data(), scales.data(), ones.data(),
                        nullptr,  dh.data(),     nullptr,       products.data()};
  table.rms_norm_backward[0](to, 1, 4);
  CHECK(std::abs(products[1] - 4 * scales[0]) < 1e-6f);
  // The result does not change if the row is multiplied by a factor, so the gradient is orthogonal to the row.
  CHECK(std::abs(dh[0] * 3 + dh[1] * 4 + dh[2] * 3 + dh[3] * 4) < 1e-5f);
}

void gated_by_definition(const Kernels& table) {
  const std::vector<float> x = numbers(1000), up(1000, 2.0f);
  std::vector<float> y(1000);
  table.swiglu[0](x.data(), up.data(), y.data(), 1000, 960);
  for (std::size_t i = 0; i < 1000; ++i) {
    const double wide = x[i], expected = 2 * wide / (1 + std::exp(-wide));
    const bool close = std::abs(y[i] - expected) <= 3e-7 * std::abs(expected) + 1e-37;
    CHECK(std::isnan(expected) ? std::isnan(y[i]) : std::isinf(expected) ? y[i] > 1e38f : close);
  }
}

void places() {
  const Pooling pooling{5, 7, 3, 4, 3, 3, 2, 2, 1, 1, 1, 1};
  std::vector<std::int64_t> indices, back(12);
  for (std::int64_t y = 0; y < 3; ++y) {
    for (std::int64_t x = 0; x < 4; ++x) indices.push_back(y * 2 * 7 + (x * 2 < 7 ? x * 2 : 6));
  }
  Bytes codes(6);
  encode_places(pooling, indices.data(), 1, codes.data(), 1);
  decode_places(pooling, codes.data(), 1, back.data(), 1);
  CHECK(pooling.bits() == 4 && back == indices);
}

}  // namespace

int main() {
  const Kernels& base = *kernels_for("base");
  for (const char* isa : {"base", "v3", "v4"}) {
    const Kernels* const table = kernels_for(isa);
    if (table == nullptr) continue;
    for (const std::size_t count : {0, 1, 7, 63, 64, 65, 1000}) activations(*table, count);
    dropout(*table);
    product(*table);
    same_bytes(base, *table);
    fused_operators(base, *table);
    norm_of_known_rows(*table);
    gated_by_definition(*table);
  }
  places();
}
