// Each function processes the values in tiles that stay in the L1 cache, one kernel after another.
#include "simd/codec.hpp"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/error.hpp"
#include "simd/kernels.hpp"

namespace ff::simd {
namespace {

constexpr std::size_t kTile = 2048;
static_assert(kTile % kInt8Block == 0 && kInt8Block % kTileStep == 0);

struct alignas(64) Tile {
  float x[kTile];
};

// Returns the element type on the wire; int8 has none.
DType wire_type(Codec codec, DType dtype) {
  switch (codec) {
    case Codec::fp32: return DType::f32;
    case Codec::bf16: return DType::bf16;
    case Codec::fp16: return DType::f16;
    default: return dtype;
  }
}

void require(Codec codec, DType dtype) {
  if (codec > Codec::int8) throw Error(Code::invalid, "unknown wire codec");
  if (reduce_kernel(dtype, Op::sum) == nullptr) throw Error(Code::invalid, "unknown element type");
  if (codec != Codec::none && widen_kernel(dtype) == nullptr) {
    throw Error(Code::invalid, std::string("unsupported wire codec for ") + name_of(dtype) +
                                   ": use codec none, or tensors of float32 or shorter floats");
  }
}

void apply(ReduceFn kernel, const void* source, std::size_t count, void* target, double scale = 1.0) {
  kernel(&target, 1, &source, 1, count, scale);
}

void apply(ReduceFn kernel, const void* a, const void* b, std::size_t count, void* target, double scale = 1.0) {
  const void* sources[] = {a, b};
  kernel(&target, 1, sources, 2, count, scale);
}

std::size_t wire_bytes(Codec codec, DType dtype, std::size_t count) {
  if (codec != Codec::int8) return count * size_of(wire_type(codec, dtype));
  return count + (count + kInt8Block - 1) / kInt8Block * sizeof(float);
}

// Calls body(first, n) for every tile.
template <class Body>
void for_tiles(std::size_t count, Body body) {
  for (std::size_t i = 0; i < count; i += kTile) body(i, std::min(kTile, count - i));
}

void clear_past(Tile& tile, std::size_t n) {
  std::fill(tile.x + n, tile.x + (n + kTileStep - 1) / kTileStep * kTileStep, 0.0f);
}

// Converts n wire values to floats in `out`.
void unpack(Codec codec, const char* wire, std::size_t n, Tile& out) {
  if (codec == Codec::int8) {
    kernels().codec.decode_int8(wire, n, out.x);
  } else {
    apply(widen_kernel(wire_type(codec, DType::f32)), wire, n, out.x);
  }
}

void pack(Codec codec, const Tile& x, std::size_t n, std::uint64_t seed, std::size_t first, char* wire, Tile& scratch) {
  const CodecKernels& kernel = kernels().codec;
  if (codec == Codec::int8) return kernel.encode_int8(x.x, n, seed, first, wire);
  const bool random = seed != 0 && codec != Codec::fp32;
  if (random) {
    const auto dither = codec == Codec::bf16 ? kernel.dither_bf16 : kernel.dither_f16;
    dither(x.x, n, seed, first, scratch.x);
  }
  apply(narrow_kernel(wire_type(codec, DType::f32)), random ? scratch.x : x.x, n, wire);
}

// Returns the kernel that converts `from` to `to` with at most one rounding, or nullptr.
ReduceFn direct_kernel(DType from, DType to) {
  if (from == to) return reduce_kernel(to, Op::sum);
  if (to == DType::f32) return widen_kernel(from);
  return from == DType::f32 ? narrow_kernel(to) : nullptr;
}

}  // namespace

std::size_t encoded_bytes(Codec codec, DType dtype, std::size_t count) {
  require(codec, dtype);
  return wire_bytes(codec, dtype, count);
}

void encode(Codec codec, DType dtype, const void* values, std::size_t count, void* wire, float* residual,
            std::uint64_t seed) {
  require(codec, dtype);
  if (codec == Codec::none) {
    if (count > 0) std::memcpy(wire, values, count * size_of(dtype));
    return;
  }
  if (residual == nullptr && codec != Codec::int8 && (seed == 0 || codec == Codec::fp32)) {
    if (const auto kernel = direct_kernel(dtype, wire_type(codec, dtype))) {
      return apply(kernel, values, count, wire);
    }
  }
  Tile x, scratch;
  for_tiles(count, [&](std::size_t i, std::size_t n) {
    clear_past(x, n);
    clear_past(scratch, n);
    apply(widen_kernel(dtype), static_cast<const char*>(values) + i * size_of(dtype), n, x.x);
    if (residual != nullptr) apply(widen_kernel(DType::f32), x.x, residual + i, n, x.x);
    char* const bytes = static_cast<char*>(wire) + wire_bytes(codec, dtype, i);
    pack(codec, x, n, seed, i, bytes, scratch);
    if (residual == nullptr) return;
    unpack(codec, bytes, n, scratch);
    kernels().codec.subtract(x.x, scratch.x, n, residual + i);
  });
}

void decode(Codec codec, DType dtype, const void* wire, std::size_t count, void* values, double scale) {
  require(codec, dtype);
  if (codec != Codec::int8) {
    if (const auto kernel = direct_kernel(wire_type(codec, dtype), dtype)) {
      return apply(kernel, wire, count, values, scale);
    }
  }
  Tile x;
  for_tiles(count, [&](std::size_t i, std::size_t n) {
    unpack(codec, static_cast<const char*>(wire) + wire_bytes(codec, dtype, i), n, x);
    apply(narrow_kernel(dtype), x.x, n, static_cast<char*>(values) + i * size_of(dtype), scale);
  });
}

void decode_add(Codec codec, DType dtype, const void* wire, std::size_t count, void* values, double scale) {
  require(codec, dtype);
  if (codec != Codec::int8 && wire_type(codec, dtype) == dtype) {
    return apply(reduce_kernel(dtype, Op::sum), values, wire, count, values, scale);
  }
  Tile own, other;
  for_tiles(count, [&](std::size_t i, std::size_t n) {
    char* const mine = static_cast<char*>(values) + i * size_of(dtype);
    unpack(codec, static_cast<const char*>(wire) + wire_bytes(codec, dtype, i), n, other);
    if (dtype != DType::f32) apply(widen_kernel(dtype), mine, n, own.x);
    const void* const term = dtype == DType::f32 ? static_cast<const void*>(mine) : own.x;
    apply(narrow_kernel(dtype), term, other.x, n, mine, scale);
  });
}

}  // namespace ff::simd
