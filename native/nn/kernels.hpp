// Kernels of fireflyer.nn, one table per instruction set. Pure functions on memory: thread-safe, no state. All
// instruction sets write the same bytes, but for the sign and payload of NaN.
//
// Bits: element i is bit i % 8 of byte i / 8. A kernel may write and read the bits of whole words of 64 elements, so
// their memory is a multiple of 8 bytes. No other memory needs alignment.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ff::nn {

enum class Float : std::uint32_t { f32, f64, f16, bf16 };
inline constexpr std::uint32_t kFloats = 4;

inline std::size_t size_of(Float type) {
  constexpr std::size_t kSizes[] = {4, 8, 2, 2};
  return kSizes[static_cast<std::uint32_t>(type)];
}

enum class Activation : std::uint32_t { relu, relu6, leaky };
inline constexpr std::uint32_t kActivations = 3;

// Memory of an RMS norm of rows: h = x + residual, y = h * scale * weight, scale = 1 / sqrt(mean(h^2) + eps). Without
// `residual` h is x, and not written. `weight` may be null. `scales` have the accumulators' type: f64 for
// f64, else f32.
struct NormForward {
  const void *x, *residual, *weight;
  void *h, *y, *scales;
};

// Memory of an RMS norm's gradients. dh is the gradient of h, from `g` (gradient of y) and, unless null, `gh` (of h).
// If `apart` is not null, `apart` gets the summand that goes through the scale, and dh gets the other summand. If
// `products` is not null, it gets g * h * scale in the accumulators' type; their sum over the rows is the weight's
// gradient.
struct NormBackward {
  const void *h, *weight, *scales, *g, *gh;
  void *dh, *apart, *products;
};

struct Kernels {
  // y[i] = activation(x[i]); bit i is set if the gradient passes unchanged. relu keeps -0 and NaN, as PyTorch does on
  // CPUs. Only `leaky` uses `slope`. y may be x.
  using Forward = void (*)(const void* x, void* y, std::uint8_t* bits, std::size_t count, double slope);
  Forward forward[kActivations][kFloats];
  // dx[i] = bit i ? g[i] : +0; with `leak` g[i] * slope instead of +0. dx may be g.
  using Backward = void (*)(const void* g, const std::uint8_t* bits, void* dx, std::size_t count, double slope);
  Backward select[kFloats], leak[kFloats];
  // y[i] = x[i] * (hash(seed, first + i) < threshold ? 0 : scale), the product rounded once; y may be x.
  // REQUIRES: `first` is a multiple of 64.
  using Dropout = void (*)(const void* x, void* y, std::size_t count, std::uint64_t seed, std::uint64_t first,
                           std::uint32_t threshold, double scale);
  Dropout dropout[kFloats];
  // y = silu(gate) * up, silu rounded to the type. The first `whole` elements use the exponential of PyTorch's vectors,
  // the other elements use the C library's exponential. The entry for f64 is null.
  using SwiGlu = void (*)(const void* gate, const void* up, void* y, std::size_t count, std::size_t whole);
  SwiGlu swiglu[kFloats];
  using SwiGluBackward = void (*)(const void* g, const void* gate, const void* up, void* d_gate, void* d_up,
                                  std::size_t count, std::size_t whole);
  SwiGluBackward swiglu_backward[kFloats];
  void (*rms_norm[kFloats])(const NormForward& of, std::size_t rows, std::size_t width, double eps);
  void (*rms_norm_backward[kFloats])(const NormBackward& of, std::size_t rows, std::size_t width);
  // out[m][n] = sum over planes i, j of 2^(i + j) times the number of ones in (row m of plane i of a) & (row n of
  // plane j of b), for `rows` rows of a and kPanel * panels of b.
  //   a: [planes_a][stride_rows][words] words of 64 bits, of which the first `rows` rows count;
  //   b: [planes_b][panels][words][kPanel]: the rows of b in panels, word by word;
  //   out: row m begins at out + m * kPanel * panels.
  using BitProduct = void (*)(const std::uint64_t* a, std::size_t planes_a, std::size_t stride_rows,
                              const std::uint64_t* b, std::size_t planes_b, std::size_t rows, std::size_t panels,
                              std::size_t words, std::int32_t* out);
  BitProduct bit_product;
};

inline constexpr std::size_t kPanel = 8;  // rows of b in a panel

// Returns the table of the instruction set in use (base/isa.hpp); throws what ff::isa() throws.
const Kernels& kernels();

// Returns the table of one instruction set, or nullptr if this processor lacks it.
const Kernels* kernels_for(const char* isa);

}  // namespace ff::nn
