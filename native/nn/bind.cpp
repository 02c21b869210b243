// Python binding of the operators' kernels: `fireflyer._native.nn`. Tensors cross as pointers, without a check: the
// Python side owns shapes, types and lifetimes. Every call releases the GIL and shares long work among the process's
// pool of threads.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "base/process/worker_pool.hpp"
#include "nn/kernels.hpp"
#include "nn/pool.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ff::nn {

void bind(nb::module_ m);

namespace {

using Address = std::uintptr_t;

template <class T>
T* at(Address address) { return reinterpret_cast<T*>(address); }

// Elements that are worth a thread's time, a multiple of 64 so that no two threads share a word of bits.
constexpr std::size_t kGrain = std::size_t{1} << 17;

template <class Part>
void in_parts(std::size_t count, unsigned threads, Part part) {
  const std::size_t parts = std::clamp<std::size_t>(count / kGrain, 1, threads);
  const std::size_t each = (count / parts + 63) / 64 * 64;
  const nb::gil_scoped_release release;
  if (parts == 1) return part(std::size_t{0}, count);
  worker_pool::share(threads, parts, [&](std::size_t i) {
    const std::size_t begin = std::min(count, i * each);
    part(begin, (i + 1 == parts ? count : std::min(count, begin + each)) - begin);
  });
}

void forward(std::uint32_t activation, std::uint32_t type, Address x, Address y, Address bits, std::size_t count,
             double slope, unsigned threads) {
  const auto kernel = kernels().forward[activation][type];
  const std::size_t size = size_of(static_cast<Float>(type));
  in_parts(count, threads, [&](std::size_t begin, std::size_t n) {
    kernel(at<const char>(x) + begin * size, at<char>(y) + begin * size, at<std::uint8_t>(bits) + begin / 8, n, slope);
  });
}

void backward(bool leaking, std::uint32_t type, Address g, Address bits, Address dx, std::size_t count, double slope,
              unsigned threads) {
  const auto kernel = (leaking ? kernels().leak : kernels().select)[type];
  const std::size_t size = size_of(static_cast<Float>(type));
  in_parts(count, threads, [&](std::size_t begin, std::size_t n) {
    kernel(at<const char>(g) + begin * size, at<const std::uint8_t>(bits) + begin / 8, at<char>(dx) + begin * size, n,
           slope);
  });
}

void dropout(std::uint32_t type, Address x, Address y, std::size_t count, std::uint64_t seed, std::uint32_t threshold,
             double scale, unsigned threads) {
  const auto kernel = kernels().dropout[type];
  const std::size_t size = size_of(static_cast<Float>(type));
  in_parts(count, threads, [&](std::size_t begin, std::size_t n) {
    kernel(at<const char>(x) + begin * size, at<char>(y) + begin * size, n, seed, begin, threshold, scale);
  });
}

void bit_product(Address a, std::size_t planes_a, Address b, std::size_t planes_b, std::size_t rows,
                 std::size_t panels, std::size_t words, Address out, unsigned threads) {
  constexpr std::size_t kRows = 64;  // their planes stay in the cache beside a panel
  const auto kernel = kernels().bit_product;
  const nb::gil_scoped_release release;
  worker_pool::share(threads, (rows + kRows - 1) / kRows, [&](std::size_t i) {
    const std::size_t first = i * kRows;
    kernel(at<const std::uint64_t>(a) + first * words, planes_a, rows, at<const std::uint64_t>(b), planes_b,
           std::min(kRows, rows - first), panels, words, at<std::int32_t>(out) + first * panels * kPanel);
  });
}

using Numbers = std::array<std::int64_t, 12>;

Pooling pooling_of(const Numbers& n) {
  return {n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11]};
}

void encode(const Numbers& numbers, Address indices, std::size_t planes, Address codes, unsigned threads) {
  const nb::gil_scoped_release release;
  encode_places(pooling_of(numbers), at<const std::int64_t>(indices), planes, at<std::uint8_t>(codes), threads);
}

void decode(const Numbers& numbers, Address codes, std::size_t planes, Address indices, unsigned threads) {
  const nb::gil_scoped_release release;
  decode_places(pooling_of(numbers), at<const std::uint8_t>(codes), planes, at<std::int64_t>(indices), threads);
}

}  // namespace

void bind(nb::module_ m) {
  m.doc() = "Kernels of the operators of fireflyer.nn, on addresses. `type`: 0 float32, 1 float64, 2 float16, 3 bfloat16.";
  m.def("forward", &forward, "activation"_a, "type"_a, "x"_a, "y"_a, "bits"_a, "count"_a, "slope"_a, "threads"_a,
        "Activation 0 ReLU, 1 ReLU6, 2 leaky ReLU, and a bit an element: the gradient passes. Bits: a multiple of 8 bytes.");
  m.def("backward", &backward, "leaking"_a, "type"_a, "g"_a, "bits"_a, "dx"_a, "count"_a, "slope"_a, "threads"_a,
        "The gradient where its bit is set; elsewhere 0, or the gradient times `slope`.");
  m.def("dropout", &dropout, "type"_a, "x"_a, "y"_a, "count"_a, "seed"_a, "threshold"_a, "scale"_a, "threads"_a,
        "Times 0 where the hash of the seed and the element's number is below `threshold`, times `scale` elsewhere.");
  m.def("bit_product", &bit_product, "a"_a, "planes_a"_a, "b"_a, "planes_b"_a, "rows"_a, "panels"_a, "words"_a, "out"_a,
        "threads"_a, "Product of bit planes (nn/kernels.hpp) to int32.");
  m.def("encode_places", &encode, "pooling"_a, "indices"_a, "planes"_a, "codes"_a, "threads"_a,
        "Places of maxima in their windows, in 2, 4 or 8 bits, of places in planes; `pooling` as in nn/pool.hpp.");
  m.def("decode_places", &decode, "pooling"_a, "codes"_a, "planes"_a, "indices"_a, "threads"_a,
        "The reverse of `encode_places`.");
}

}  // namespace ff::nn
