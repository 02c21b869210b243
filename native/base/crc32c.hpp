// CRC32C (Castagnoli, as in iSCSI and ext4): crc32c(0, "123456789", 9) == 0xE3069283. Thread-safe; no state.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ff {

// Continues `value` (0 at the start) over `size` bytes; by the processor's instructions where it has them.
std::uint32_t crc32c(std::uint32_t value, const void* data, std::size_t size);
// The CRC32C of A and B after each other, from theirs and B's length in bytes.
std::uint32_t crc32c_combine(std::uint32_t a, std::uint32_t b, std::uint64_t bytes_b);
// Continues `value` over `size` zeros, in time proportional to log(size).
std::uint32_t crc32c_zeros(std::uint32_t value, std::uint64_t size);

namespace detail {
// Slower ones, for tests: without what processors have, and with nothing wider than the CRC instruction.
std::uint32_t crc32c_instruction(std::uint32_t value, const void* data, std::size_t size);
std::uint32_t crc32c_portable(std::uint32_t value, const void* data, std::size_t size);
}  // namespace detail

}  // namespace ff
