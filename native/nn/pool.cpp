#include "nn/pool.hpp"

#include <cstring>

#include "base/process/worker_pool.hpp"

namespace ff::nn {
namespace {

// Calls each(place in the output plane, first row of its window, first column of its window), in order of places. The
// row and the column may be negative.
template <class Each>
void for_windows(const Pooling& pooling, Each each) {
  std::int64_t place = 0;
  for (std::int64_t y = 0; y < pooling.out_height; ++y) {
    const std::int64_t top = y * pooling.stride_height - pooling.pad_height;
    for (std::int64_t x = 0; x < pooling.out_width; ++x) {
      each(place++, top, x * pooling.stride_width - pooling.pad_width);
    }
  }
}

std::size_t bytes_of_a_plane(const Pooling& pooling) {
  const auto places = static_cast<std::size_t>(pooling.out_height * pooling.out_width);
  return (places * pooling.bits() + 7) / 8;
}

}  // namespace

unsigned Pooling::bits() const {
  const std::int64_t places = kernel_height * kernel_width;
  return places <= 4 ? 2 : places <= 16 ? 4 : places <= 256 ? 8 : 0;
}

void encode_places(const Pooling& pooling, const std::int64_t* indices, std::size_t planes, std::uint8_t* codes,
                   unsigned threads) {
  const std::size_t bytes = bytes_of_a_plane(pooling);
  const unsigned bits = pooling.bits(), per_byte = 8 / bits;
  worker_pool::share(threads, planes, [&](std::size_t plane) {
    const std::int64_t* const its = indices + plane * static_cast<std::size_t>(pooling.out_height * pooling.out_width);
    std::uint8_t* const to = codes + plane * bytes;
    std::memset(to, 0, bytes);
    for_windows(pooling, [&](std::int64_t place, std::int64_t top, std::int64_t left) {
      const auto index = static_cast<std::uint32_t>(its[place]), width = static_cast<std::uint32_t>(pooling.width);
      const std::uint32_t row = index / width;
      const auto down = (static_cast<std::int64_t>(row) - top) / pooling.dilation_height;
      const auto along = (static_cast<std::int64_t>(index - row * width) - left) / pooling.dilation_width;
      const auto code = static_cast<unsigned>(down * pooling.kernel_width + along);
      const auto at = static_cast<std::size_t>(place);
      to[at / per_byte] = static_cast<std::uint8_t>(to[at / per_byte] | code << at % per_byte * bits);
    });
  });
}

void decode_places(const Pooling& pooling, const std::uint8_t* codes, std::size_t planes, std::int64_t* indices,
                   unsigned threads) {
  const std::size_t bytes = bytes_of_a_plane(pooling);
  const unsigned bits = pooling.bits(), per_byte = 8 / bits, most = (1u << bits) - 1;
  worker_pool::share(threads, planes, [&](std::size_t plane) {
    std::int64_t* const to = indices + plane * static_cast<std::size_t>(pooling.out_height * pooling.out_width);
    const std::uint8_t* const its = codes + plane * bytes;
    for_windows(pooling, [&](std::int64_t place, std::int64_t top, std::int64_t left) {
      const auto at = static_cast<std::size_t>(place);
      const unsigned code = its[at / per_byte] >> at % per_byte * bits & most;
      const auto down = static_cast<std::int64_t>(code / static_cast<unsigned>(pooling.kernel_width));
      const auto along = static_cast<std::int64_t>(code % static_cast<unsigned>(pooling.kernel_width));
      to[place] = (top + down * pooling.dilation_height) * pooling.width + left + along * pooling.dilation_width;
    });
  });
}

}  // namespace ff::nn
