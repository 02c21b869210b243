// SwiGLU, silu(gate) * up, with PyTorch's bits. Included by kernels.inl.
//
// PyTorch uses SLEEF's exponential for whole vectors, and the C library's for the rest of a thread's share. PyTorch's
// compiler fuses 1 + x * (1 - sigmoid) into one rounding.
#pragma once

#include "nn/rows.inl"

namespace ff::nn {
namespace {

using simd::F32;
using simd::I32;
using simd::splat;

// If `whole`, SLEEF's expf of 1 ulp, operation by operation; else the C library's expf.
template <bool whole>
inline __attribute__((always_inline)) F32 exponential(F32 d) {
  if constexpr (!whole) {
    for (std::size_t lane = 0; lane < simd::kLanes; ++lane) d[lane] = __builtin_expf(d[lane]);
    return d;
  }
  const I32 q = simd::to_integer(d * splat<F32>(0x1.715476p+0f));
  const F32 n = __builtin_convertvector(q, F32);
  F32 s = simd::fused(n, splat<F32>(-0.693145751953125f), d);
  s = simd::fused(n, splat<F32>(-1.428606765330187045e-06f), s);
  F32 u = splat<F32>(0.000198527617612853646278381f);
  u = simd::fused(u, s, splat<F32>(0.00139304355252534151077271f));
  u = simd::fused(u, s, splat<F32>(0.00833336077630519866943359f));
  u = simd::fused(u, s, splat<F32>(0.0416664853692054748535156f));
  u = simd::fused(u, s, splat<F32>(0.166666671633720397949219f));
  u = simd::fused(u, s, splat<F32>(0.5f));
  u = 1.0f + simd::fused(s * s, u, s);
  const I32 half = q >> 1;
  u = u * simd::as<F32>((half + 127) << 23) * simd::as<F32>((q - half + 127) << 23);
  u = d < -104.0f ? F32{} : u;
  return d > 100.0f ? splat<F32>(__builtin_inff()) : u;
}

template <class T, bool whole>
void swiglu_part(const char* gate, const char* up, char* y, std::size_t count) {
  for (std::size_t i = 0; i < count; i += T::step) {
    F32 a[kVectors], b[kVectors];
    read<T>(gate + i * T::size, count - i, a);
    read<T>(up + i * T::size, count - i, b);
    for (auto& v : a) v = v / (1.0f + exponential<whole>(-v));
    settle<T>(a);
    for (std::size_t j = 0; j < kVectors; ++j) a[j] *= b[j];
    write<T>(y + i * T::size, count - i, a);
  }
}

template <class T, bool whole>
void swiglu_backward_part(const char* g, const char* gate, const char* up, char* d_gate, char* d_up,
                          std::size_t count) {
  for (std::size_t i = 0; i < count; i += T::step) {
    F32 dy[kVectors], a[kVectors], b[kVectors], silu[kVectors], sigmoid[kVectors];
    read<T>(g + i * T::size, count - i, dy);
    read<T>(gate + i * T::size, count - i, a);
    read<T>(up + i * T::size, count - i, b);
    for (std::size_t j = 0; j < kVectors; ++j) {
      const F32 below = 1.0f + exponential<whole>(-a[j]);
      silu[j] = a[j] / below;
      sigmoid[j] = 1.0f / below;
      b[j] *= dy[j];
    }
    settle<T>(silu);
    settle<T>(b);
    for (std::size_t j = 0; j < kVectors; ++j) {
      silu[j] *= dy[j];
      a[j] = b[j] * sigmoid[j] * simd::fused(a[j], 1.0f - sigmoid[j], splat<F32>(1.0f));
    }
    write<T>(d_gate + i * T::size, count - i, a);
    write<T>(d_up + i * T::size, count - i, silu);
  }
}

template <class T>
void swiglu(const void* gate, const void* up, void* y, std::size_t count, std::size_t whole) {
  const auto *a = static_cast<const char*>(gate), *b = static_cast<const char*>(up);
  auto* const to = static_cast<char*>(y);
  swiglu_part<T, true>(a, b, to, whole);
  const std::size_t rest = whole * T::size;
  swiglu_part<T, false>(a + rest, b + rest, to + rest, count - whole);
}

template <class T>
void swiglu_backward(const void* g, const void* gate, const void* up, void* d_gate, void* d_up, std::size_t count,
                     std::size_t whole) {
  const auto *dy = static_cast<const char*>(g), *a = static_cast<const char*>(gate), *b = static_cast<const char*>(up);
  auto *da = static_cast<char*>(d_gate), *db = static_cast<char*>(d_up);
  swiglu_backward_part<T, true>(dy, a, b, da, db, whole);
  const std::size_t rest = whole * T::size;
  swiglu_backward_part<T, false>(dy + rest, a + rest, b + rest, da + rest, db + rest, count - whole);
}

}  // namespace
}  // namespace ff::nn
