#pragma once
#include <cstddef>
#include <cstdint>
#include "simd/dtype.hpp"
namespace ff::simd {
enum class Codec : std::uint8_t { none, fp32, bf16, fp16, int8 };
}
