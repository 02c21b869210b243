// Max pooling: codes of 2, 4 or 8 bits for the place of each maximum inside its window. Pure functions on memory; they
// share the work among the process's pool of threads.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ff::nn {

// A pooling of planes of `height` x `width`, row by row, to planes of `out_height` x `out_width`.
struct Pooling {
  std::int64_t height, width, out_height, out_width;
  std::int64_t kernel_height, kernel_width, stride_height, stride_width;
  std::int64_t pad_height, pad_width, dilation_height, dilation_width;

  // Bits of a code: 2, 4 or 8; 0 if the window has more than 256 places.
  unsigned bits() const;
};

// Converts each maximum's place in the plane to its place in its window: row * kernel_width + column.
// Plane p begins at byte p * ceil(out_height * out_width * bits / 8) of `codes`.
// REQUIRES: bits() > 0, and each index lies in its window.
void encode_places(const Pooling& pooling, const std::int64_t* indices, std::size_t planes, std::uint8_t* codes,
                   unsigned threads);

// Converts codes of encode_places back to places in planes.
void decode_places(const Pooling& pooling, const std::uint8_t* codes, std::size_t planes, std::int64_t* indices,
                   unsigned threads);

}  // namespace ff::nn
