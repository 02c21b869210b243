#include "base/crc/crc32c.hpp"

#include <immintrin.h>

#include <array>
#include <cstring>

namespace ff {
namespace {

constexpr std::uint32_t kPolynomial = 0x82F63B78;  // reflected: bit 31 is x^0

// Returns a * b modulo the polynomial.
constexpr std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  for (std::uint32_t bit = std::uint32_t{1} << 31; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = (b >> 1) ^ ((b & 1) ? kPolynomial : 0);
  }
  return product;
}

// Returns the powers x^(8 * 2^k). Multiplying a register by power k appends 2^k zero bytes.
constexpr std::array<std::uint32_t, 64> make_powers() {
  std::array<std::uint32_t, 64> powers{};
  powers[0] = std::uint32_t{1} << (31 - 8);
  for (std::size_t k = 1; k < powers.size(); ++k) powers[k] = multiply(powers[k - 1], powers[k - 1]);
  return powers;
}
constexpr auto kPowers = make_powers();

constexpr std::uint32_t power(std::uint64_t bytes) {
  std::uint32_t product = std::uint32_t{1} << 31;
  for (std::size_t k = 0; bytes != 0; bytes >>= 1, ++k)
    if (bytes & 1) product = multiply(kPowers[k], product);
  return product;
}

// Appends a fixed number of zero bytes by four table look-ups.
class Shift {
 public:
  explicit constexpr Shift(std::uint64_t bytes) {
    const std::uint32_t factor = power(bytes);
    for (std::size_t t = 0; t < 4; ++t)
      for (std::uint32_t i = 0; i < 256; ++i) tables_[t][i] = multiply(i << (8 * t), factor);
  }
  constexpr std::uint32_t operator()(std::uint32_t c) const {
    return tables_[0][c & 0xFF] ^ tables_[1][(c >> 8) & 0xFF] ^ tables_[2][(c >> 16) & 0xFF] ^ tables_[3][c >> 24];
  }

 private:
  std::array<std::array<std::uint32_t, 256>, 4> tables_{};
};

constexpr std::size_t kLong = 1360, kShort = 168;  // bytes of each of three streams: blocks of 4080 and 504 bytes
constexpr Shift kShiftLong(kLong), kShiftShort(kShort), kShiftBlock(4096);

std::uint32_t shift(std::uint32_t c, std::uint64_t bytes) {
  if (bytes == 4096) return kShiftBlock(c);
  for (std::size_t k = 0; bytes != 0 && c != 0; bytes >>= 1, ++k)
    if (bytes & 1) c = multiply(kPowers[k], c);
  return c;
}

constexpr std::array<std::array<std::uint32_t, 256>, 8> make_tables() {
  std::array<std::array<std::uint32_t, 256>, 8> tables{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t c = i;
    for (int bit = 0; bit < 8; ++bit) c = (c >> 1) ^ ((c & 1) ? kPolynomial : 0);
    tables[0][i] = c;
  }
  for (std::uint32_t i = 0; i < 256; ++i)
    for (std::size_t t = 1; t < 8; ++t) tables[t][i] = (tables[t - 1][i] >> 8) ^ tables[0][tables[t - 1][i] & 0xFF];
  return tables;
}
constexpr auto kTables = make_tables();

#define FF_SSE42 __attribute__((target("sse4.2")))

FF_SSE42 inline std::uint64_t word(std::uint64_t c, const unsigned char* p) {
  std::uint64_t value;
  std::memcpy(&value, p, 8);
  return _mm_crc32_u64(c, value);
}

// Continues the register `c` over three adjacent streams of `Bytes` bytes each. The CRC32 instruction has a latency of
// three cycles and a throughput of one per cycle. So the streams run side by side, and `join` combines their registers.
// The processor prefetches only one stream in each page. For long streams this function therefore prefetches the
// 3 * Bytes bytes that follow the streams.
template <std::size_t Bytes>
FF_SSE42 inline std::uint32_t three(std::uint32_t c, const unsigned char* p, const Shift& join) {
  std::uint64_t a = c, b = 0, d = 0;
  for (std::size_t i = 0; i < Bytes; i += 8) {
    if (Bytes == kLong && i % 64 == 0) {
      const auto* const ahead = reinterpret_cast<const char*>(p) + 3 * (Bytes + i);
      for (int line = 0; line < 3; ++line) _mm_prefetch(ahead + line * 64, _MM_HINT_T0);  // harmless beyond the end
    }
    a = word(a, p + i);
    b = word(b, p + Bytes + i);
    d = word(d, p + 2 * Bytes + i);
  }
  return join(join(static_cast<std::uint32_t>(a)) ^ static_cast<std::uint32_t>(b)) ^ static_cast<std::uint32_t>(d);
}

FF_SSE42 std::uint32_t crc32c_sse42(std::uint32_t value, const unsigned char* p, std::size_t size) {
  std::uint32_t c = ~value;
  for (; size >= 3 * kLong; p += 3 * kLong, size -= 3 * kLong) c = three<kLong>(c, p, kShiftLong);
  for (; size >= 3 * kShort; p += 3 * kShort, size -= 3 * kShort) c = three<kShort>(c, p, kShiftShort);
  for (; size >= 8; p += 8, size -= 8) c = static_cast<std::uint32_t>(word(c, p));
  for (; size > 0; ++p, --size) c = _mm_crc32_u8(c, *p);
  return ~c;
}

constexpr CrcFactors kFactors = {
    .by2048 = {0xdcb17aa4, 0xb9e02b86}, .by512 = {0x740eef02, 0x9e4addf8}, .by128 = {0xf20c0dfe, 0x14cd00bd6}};

// Folds the first part by `wider` and processes the rest by the CRC32 instruction. REQUIRES: size >= 256.
FF_SSE42 std::uint32_t crc32c_folded(CrcFold wider, std::uint32_t value, const unsigned char* p, std::size_t size) {
  const std::size_t folded = size & ~std::size_t{63};
  const Folded a = wider(~value, p, folded, kFactors);
  const std::uint64_t c = _mm_crc32_u64(_mm_crc32_u64(0, a.low), a.high);
  return crc32c_sse42(~static_cast<std::uint32_t>(c), p + folded, size - folded);
}

}  // namespace

namespace detail {

std::uint32_t crc32c_by(CrcFold wider, std::uint32_t value, const void* data, std::size_t size) {
  static const bool instruction = __builtin_cpu_supports("sse4.2");
  if (!instruction) return crc32c_portable(value, data, size);
  const auto* const p = static_cast<const unsigned char*>(data);
  return wider != nullptr && size >= 256 ? crc32c_folded(wider, value, p, size) : crc32c_sse42(value, p, size);
}

// Processes eight bytes a step by tables ("slicing by 8", Kounavis and Berry 2005).
std::uint32_t crc32c_portable(std::uint32_t value, const void* data, std::size_t size) {
  const auto* p = static_cast<const unsigned char*>(data);
  std::uint32_t c = ~value;
  for (; size >= 8; p += 8, size -= 8) {
    std::uint32_t low, high;
    std::memcpy(&low, p, 4);
    std::memcpy(&high, p + 4, 4);
    low ^= c;
    c = kTables[7][low & 0xFF] ^ kTables[6][(low >> 8) & 0xFF] ^ kTables[5][(low >> 16) & 0xFF] ^
        kTables[4][low >> 24] ^ kTables[3][high & 0xFF] ^ kTables[2][(high >> 8) & 0xFF] ^
        kTables[1][(high >> 16) & 0xFF] ^ kTables[0][high >> 24];
  }
  for (; size > 0; ++p, --size) c = (c >> 8) ^ kTables[0][(c ^ *p) & 0xFF];
  return ~c;
}

}  // namespace detail

std::uint32_t crc32c(std::uint32_t value, const void* data, std::size_t size) {
  static const CrcFold widest = crc_fold(isa());
  return detail::crc32c_by(widest, value, data, size);
}

std::uint32_t crc32c_combine(std::uint32_t a, std::uint32_t b, std::uint64_t bytes_b) { return shift(a, bytes_b) ^ b; }

std::uint32_t crc32c_zeros(std::uint32_t value, std::uint64_t size) { return ~shift(~value, size); }

}  // namespace ff
