// CRC32C (Castagnoli, as in iSCSI and ext4): crc32c(0, "123456789", 9) == 0xE3069283. Thread-safe; no state.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/crc/crc_fold.hpp"

namespace ff {

// Continues `value` (0 at the start) over `size` bytes. Uses the processor's CRC instructions if it has them.
std::uint32_t crc32c(std::uint32_t value, const void* data, std::size_t size);
// Returns the CRC32C of A followed by B, from the CRC32C of each and B's length in bytes.
std::uint32_t crc32c_combine(std::uint32_t a, std::uint32_t b, std::uint64_t bytes_b);
// Continues `value` over `size` zeros, in time proportional to log(size).
std::uint32_t crc32c_zeros(std::uint32_t value, std::uint64_t size);

namespace detail {
// Variants for tests. `crc32c_portable` uses tables only. `crc32c_by` uses the CRC32 instruction, after folding with
// `wider`, a result of crc_fold(), unless `wider` is null.
std::uint32_t crc32c_portable(std::uint32_t value, const void* data, std::size_t size);
std::uint32_t crc32c_by(CrcFold wider, std::uint32_t value, const void* data, std::size_t size);
}  // namespace detail

}  // namespace ff
