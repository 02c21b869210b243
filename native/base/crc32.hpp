// CRC32 with zlib's polynomial (IEEE 802.3, reflected). Thread-safe; no state.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ff {

// Continues `value` (0 at the start) over `size` bytes; equal to zlib's crc32(value, data, size).
std::uint32_t crc32(std::uint32_t value, const void* data, std::size_t size);

}  // namespace ff
