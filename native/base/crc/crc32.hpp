// CRC32 with zlib's polynomial (IEEE 802.3, reflected). Thread-safe; no state.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/crc/crc_fold.hpp"

namespace ff {

// Continues `value` (0 at the start) over `size` bytes; equal to zlib's crc32(value, data, size).
std::uint32_t crc32(std::uint32_t value, const void* data, std::size_t size);

namespace detail {
// Variants for tests. `crc32_portable` uses tables only. `crc32_by` folds with `wider`, a result of crc_fold(), or with
// products of 128 bits if `wider` is null.
std::uint32_t crc32_portable(std::uint32_t value, const void* data, std::size_t size);
std::uint32_t crc32_by(CrcFold wider, std::uint32_t value, const void* data, std::size_t size);
}  // namespace detail

}  // namespace ff
