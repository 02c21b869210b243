// Every instruction set gives the bits of the baseline; the baseline is right.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "base/check.hpp"
#include "simd/kernels.hpp"

using namespace ff::simd;

namespace {

template <class T>
std::vector<T> reduce(ReduceFn kernel, const std::vector<std::vector<T>>& inputs, double scale,
                      bool in_place) {
  std::vector<std::vector<T>> copies = inputs;
  std::vector<T> out(inputs[0].size()), second(inputs[0].size());
  std::vector<const void*> sources;
  for (const auto& copy : copies) sources.push_back(copy.data());
  void* targets[2] = {in_place ? copies[0].data() : out.data(), second.data()};
  kernel(targets, 2, sources.data(), sources.size(), out.size(), scale);
  const std::vector<T> first = in_place ? copies[0] : out;
  CHECK(out.empty() || std::memcmp(first.data(), second.data(), out.size() * sizeof(T)) == 0);
  return first;
}

template <class T, class Make>
void compare(ReduceFn Kernels::* kernel, Make make) {
  for (const std::size_t count : {0, 1, 15, 16, 63, 64, 65, 1000}) {
    for (const std::size_t ranks : {1, 2, 3, 8}) {
      std::vector<std::vector<T>> inputs(ranks, std::vector<T>(count));
      for (auto& input : inputs) {
        for (auto& value : input) value = make();
      }
      for (const double scale : {1.0, 1.0 / 3}) {
        const auto expected = reduce(kernels_for("base")->*kernel, inputs, scale, false);
        for (const char* isa : {"base", "v3", "v4"}) {
          const Kernels* table = kernels_for(isa);
          if (table == nullptr) continue;
          for (const bool in_place : {false, true}) {
            const auto got = reduce(table->*kernel, inputs, scale, in_place);
            CHECK(count == 0 ||
                  std::memcmp(got.data(), expected.data(), count * sizeof(T)) == 0);
          }
        }
      }
    }
  }
}

float widen(std::uint16_t b) {
  const std::uint32_t bits = static_cast<std::uint32_t>(b) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

void bf16_rounds_to_nearest_even_and_keeps_nan() {
  for (const char* isa : {"base", "v3", "v4"}) {
    const Kernels* table = kernels_for(isa);
    if (table == nullptr) continue;
    // 1 + 2^-8 lies half-way between 1 and 1 + 2^-7: to even, 1; with any more it is 1 + 2^-7.
    std::vector<std::vector<std::uint16_t>> inputs = {
        std::vector<std::uint16_t>(80, 0x3F80), std::vector<std::uint16_t>(80, 0x3B80),
        std::vector<std::uint16_t>(80, 0)};
    CHECK(reduce(table->sum_bf16, inputs, 1.0, false) == inputs[0]);
    inputs[2].assign(80, 0x3400);
    CHECK(reduce(table->sum_bf16, inputs, 1.0, false) == std::vector<std::uint16_t>(80, 0x3F81));
    inputs[1].assign(80, 0x7F81);  // a signalling NaN whose payload would round to infinity
    for (const std::uint16_t b : reduce(table->sum_bf16, inputs, 1.0, false)) CHECK(std::isnan(widen(b)));
  }
}

}  // namespace

int main() {
  std::mt19937_64 random(1);
  std::normal_distribution<double> normal;
  compare<float>(&Kernels::sum_f32, [&] { return static_cast<float>(normal(random)); });
  compare<double>(&Kernels::sum_f64, [&] { return normal(random); });
  compare<std::uint16_t>(&Kernels::sum_bf16, [&] {
    const auto f = static_cast<float>(normal(random));
    std::uint32_t bits;
    std::memcpy(&bits, &f, 4);
    return static_cast<std::uint16_t>(bits >> 16);
  });
  bf16_rounds_to_nearest_even_and_keeps_nan();
}
