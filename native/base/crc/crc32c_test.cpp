// Tests of crc32c: the vectors of RFC 3720 B.4, long inputs by tables and by instructions, combining, and zeros.
#include "base/crc/crc32c.hpp"

#include <array>
#include <numeric>
#include <random>
#include <vector>

#include "base/testing/check.hpp"
#include "base/testing/one_thread.hpp"

namespace {

void vectors() {
  std::array<unsigned char, 32> bytes{};
  CHECK(ff::crc32c(0, "123456789", 9) == 0xE3069283);
  CHECK(ff::crc32c(0, bytes.data(), 32) == 0x8A9136AA);
  bytes.fill(0xFF);
  CHECK(ff::crc32c(0, bytes.data(), 32) == 0x62A8AB43);
  std::iota(bytes.begin(), bytes.end(), static_cast<unsigned char>(0));
  CHECK(ff::crc32c(0, bytes.data(), 32) == 0x46DD794E);
  CHECK(ff::crc32c(7, bytes.data(), 0) == 7);
}

// Uses larger sizes than crc_fold_test.cpp (at most 4096 bytes), so that the variant with the CRC32 instruction
// processes several blocks of 4080 bytes.
void long_ones_agree() {
  std::mt19937_64 random(1);
  std::vector<unsigned char> bytes(20000);
  for (auto& byte : bytes) byte = static_cast<unsigned char>(random());
  for (std::size_t size = 4096; size < bytes.size() - 8; size += 97) {
    const auto* const from = bytes.data() + size % 8;
    const auto right = ff::detail::crc32c_portable(5, from, size);
    CHECK(ff::crc32c(5, from, size) == right);
    CHECK(ff::detail::crc32c_by(nullptr, 5, from, size) == right);
  }
}

void combine_and_zeros() {
  std::mt19937_64 random(2);
  std::vector<unsigned char> bytes(9000);
  for (auto& byte : bytes) byte = static_cast<unsigned char>(random());
  for (std::size_t b : {0, 1, 3, 8, 511, 4095, 4096, 4097, 8999, 9000}) {
    const std::size_t a = bytes.size() - b;
    CHECK(ff::crc32c_combine(ff::crc32c(0, bytes.data(), a), ff::crc32c(0, bytes.data() + a, b), b) ==
          ff::crc32c(0, bytes.data(), bytes.size()));
    const std::vector<unsigned char> zeros(b);
    CHECK(ff::crc32c_zeros(9, b) == ff::crc32c(9, zeros.data(), b));
  }
  // For a length that no array can have, zeros in two pieces give the same CRC as zeros in one piece.
  const std::uint64_t many = (std::uint64_t{1} << 40) + 12345;
  CHECK(ff::crc32c_zeros(ff::crc32c_zeros(1, many), 77) == ff::crc32c_zeros(1, many + 77));
  CHECK(ff::crc32c_combine(ff::crc32c_zeros(0, many), ff::crc32c_zeros(0, many), many) ==
        ff::crc32c_zeros(0, 2 * many));
}

}  // namespace

int main() {
  vectors();
  long_ones_agree();
  combine_and_zeros();
}
