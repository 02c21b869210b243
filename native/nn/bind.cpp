// Python binding of the operators' kernels: `fireflyer._native.nn`. Tensors are passed as unchecked pointers: Python
// code is responsible for shapes, types and lifetimes. Every call releases the GIL and shares long work among the
// process's pool of threads.
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
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

// Elements of a part: enough work to repay waking a thread, and a multiple of 64 so that no two threads share a word of
// bits. There are more parts than threads, so that a thread with a free core takes more of them.
constexpr std::size_t kGrain = std::size_t{1} << 17;

template <class Part>
void in_parts(std::size_t count, unsigned threads, Part part) {
  const nb::gil_scoped_release release;
  if (threads == 1 || count < 2 * kGrain) return part(std::size_t{0}, count);
  const std::size_t parts = (count + kGrain - 1) / kGrain;
  worker_pool::share(threads, parts, [&](std::size_t i) { part(i * kGrain, std::min(kGrain, count - i * kGrain)); });
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

// PyTorch's division of elements among its threads. PyTorch computes the elements of a share in pairs of vectors, and
// the rest, which does not fill a pair, one by one.
class Shares {
 public:
  // `unit`: elements of two of PyTorch's vectors.
  Shares(std::size_t count, unsigned threads, std::size_t unit) : count_(count), unit_(unit) {
    constexpr std::size_t kLeast = 32768;
    const std::size_t shares = count < kLeast ? 1 : std::min<std::size_t>(threads, (count + kLeast - 1) / kLeast);
    each_ = (count + shares - 1) / shares;
  }

  // Calls part(begin, count, whole) for the pieces of [begin, end), none of which crosses a share's end. `whole`: elements
  // at the beginning of the piece that lie in pairs of vectors.
  template <class Part>
  void visit(std::size_t begin, std::size_t end, Part part) const {
    while (begin < end) {
      const std::size_t share = begin / each_ * each_, next = std::min(share + each_, count_);
      const std::size_t vectors = share + (next - share) / unit_ * unit_, stop = std::min(end, next);
      part(begin, stop - begin, std::clamp(vectors, begin, stop) - begin);
      begin = stop;
    }
  }

 private:
  std::size_t count_, unit_, each_;
};

// Calls part(first byte, elements, whole) for the pieces of PyTorch's shares; `whole` as in Shares::visit().
template <class Part>
void in_shares(std::uint32_t type, std::size_t count, std::size_t unit, unsigned threads, Part part) {
  const std::size_t size = size_of(static_cast<Float>(type));
  const Shares shares(count, threads, unit);
  in_parts(count, threads, [&](std::size_t first, std::size_t n) {
    shares.visit(first, first + n,
                 [&](std::size_t begin, std::size_t some, std::size_t whole) { part(begin * size, some, whole); });
  });
}

void swiglu(std::uint32_t type, Address gate, Address up, Address y, std::size_t count, std::size_t unit,
            unsigned threads) {
  const auto kernel = kernels().swiglu[type];
  in_shares(type, count, unit, threads, [&](std::size_t to, std::size_t some, std::size_t whole) {
    kernel(at<const char>(gate) + to, at<const char>(up) + to, at<char>(y) + to, some, whole);
  });
}

void swiglu_backward(std::uint32_t type, Address g, Address gate, Address up, Address d_gate, Address d_up,
                     std::size_t count, std::size_t unit, unsigned threads) {
  const auto kernel = kernels().swiglu_backward[type];
  in_shares(type, count, unit, threads, [&](std::size_t to, std::size_t some, std::size_t whole) {
    kernel(at<const char>(g) + to, at<const char>(gate) + to, at<const char>(up) + to, at<char>(d_gate) + to,
           at<char>(d_up) + to, some, whole);
  });
}

// Calls part(first row, rows) for parts of rows.
template <class Part>
void in_rows(std::size_t rows, std::size_t width, unsigned threads, Part part) {
  const std::size_t each = std::max<std::size_t>(1, kGrain / width);
  const nb::gil_scoped_release release;
  if (threads == 1 || rows < 2 * each) return part(std::size_t{0}, rows);
  worker_pool::share(threads, (rows + each - 1) / each,
                     [&](std::size_t i) { part(i * each, std::min(each, rows - i * each)); });
}

std::size_t inner_size(std::uint32_t type) { return static_cast<Float>(type) == Float::f64 ? 8 : 4; }

// Advances an address by `bytes`; null stays null.
template <class T = void>
T* on(Address address, std::size_t bytes) {
  return address == 0 ? nullptr : at<T>(address + bytes);
}

void rms_norm(std::uint32_t type, const std::array<Address, 6>& memory, std::size_t rows, std::size_t width, double eps,
              unsigned threads) {
  const auto kernel = kernels().rms_norm[type];
  const std::size_t size = size_of(static_cast<Float>(type)) * width, inner = inner_size(type);
  const auto [x, residual, weight, h, y, scales] = memory;
  in_rows(rows, width, threads, [&](std::size_t row, std::size_t n) {
    const NormForward of{on(x, row * size), on(residual, row * size), on(weight, 0),
                         on(h, row * size), on(y, row * size),        on(scales, row * inner)};
    kernel(of, n, width, eps);
  });
}

void rms_norm_backward(std::uint32_t type, const std::array<Address, 8>& memory, std::size_t rows, std::size_t width,
                       unsigned threads) {
  const auto kernel = kernels().rms_norm_backward[type];
  const std::size_t size = size_of(static_cast<Float>(type)) * width, inner = inner_size(type);
  const auto [h, weight, scales, g, gh, dh, apart, products] = memory;
  in_rows(rows, width, threads, [&](std::size_t row, std::size_t n) {
    const NormBackward of{
        on(h, row * size),  on(weight, 0),      on(scales, row * inner), on(g, row * size),
        on(gh, row * size), on(dh, row * size), on(apart, row * size),   on(products, row * inner * width)};
    kernel(of, n, width);
  });
}

void bit_product(Address a, std::size_t planes_a, Address b, std::size_t planes_b, std::size_t rows, std::size_t panels,
                 std::size_t words, Address out, unsigned threads) {
  constexpr std::size_t kRows = 64;  // rows of a part: their planes and a panel of b fit in the cache
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
  m.doc() =
      "Kernels of the operators of fireflyer.nn, on addresses. `type`: 0 float32, 1 float64, 2 float16, 3 bfloat16.";
  m.def("forward", &forward, "activation"_a, "type"_a, "x"_a, "y"_a, "bits"_a, "count"_a, "slope"_a, "threads"_a,
        "Applies activation 0 (ReLU), 1 (ReLU6) or 2 (leaky ReLU), and sets the bits of elements whose gradient "
        "passes. `bits`: address of memory whose size is a multiple of 8 bytes.");
  m.def("backward", &backward, "leaking"_a, "type"_a, "g"_a, "bits"_a, "dx"_a, "count"_a, "slope"_a, "threads"_a,
        "Writes the gradient where its bit is set; elsewhere 0 or, if `leaking`, the gradient times `slope`.");
  m.def("dropout", &dropout, "type"_a, "x"_a, "y"_a, "count"_a, "seed"_a, "threshold"_a, "scale"_a, "threads"_a,
        "Multiplies by 0 where the hash of the seed and the element's number is below `threshold`, elsewhere by "
        "`scale`.");
  m.def("swiglu", &swiglu, "type"_a, "gate"_a, "up"_a, "y"_a, "count"_a, "unit"_a, "threads"_a,
        "Computes silu(gate) * up. Not for float64. `unit`: number of elements in two of torch's SIMD vectors.");
  m.def("swiglu_backward", &swiglu_backward, "type"_a, "g"_a, "gate"_a, "up"_a, "d_gate"_a, "d_up"_a, "count"_a,
        "unit"_a, "threads"_a, "Computes the gradients of gate and up.");
  m.def("rms_norm", &rms_norm, "type"_a, "memory"_a, "rows"_a, "width"_a, "eps"_a, "threads"_a,
        "Computes the RMS norm of rows; `memory`: addresses of x, residual, weight, h, y, scales (nn/kernels.hpp), 0 "
        "for none.");
  m.def("rms_norm_backward", &rms_norm_backward, "type"_a, "memory"_a, "rows"_a, "width"_a, "threads"_a,
        "Computes the gradients of rms_norm; `memory`: addresses of h, weight, scales, g, gh, dh, apart, products, 0 "
        "for none.");
  m.def("bit_product", &bit_product, "a"_a, "planes_a"_a, "b"_a, "planes_b"_a, "rows"_a, "panels"_a, "words"_a, "out"_a,
        "threads"_a, "Product of bit planes (nn/kernels.hpp) to int32.");
  m.def("encode_places", &encode, "pooling"_a, "indices"_a, "planes"_a, "codes"_a, "threads"_a,
        "Converts positions of maxima in planes to positions in their pooling windows, coded in 2, 4 or 8 bits; "
        "`pooling`: see nn/pool.hpp.");
  m.def("decode_places", &decode, "pooling"_a, "codes"_a, "planes"_a, "indices"_a, "threads"_a,
        "Converts the codes of `encode_places` to positions in planes.");
}

}  // namespace ff::nn
