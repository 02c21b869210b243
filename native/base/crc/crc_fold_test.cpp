// Tests that CRC32 and CRC32C computed with each folding width of this processor equal those computed with tables.
// Covers all sizes up to 4096, odd addresses, start registers, inputs in two pieces and combined CRCs. Also tests which
// width is in use.
#include "base/crc/crc_fold.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "base/crc/crc32.hpp"
#include "base/crc/crc32c.hpp"
#include "base/error.hpp"
#include "base/testing/check.hpp"
#include "base/testing/one_thread.hpp"

namespace {

constexpr std::size_t kMost = 4096;
constexpr std::size_t kOffsets[] = {0, 1, 7, 15, 16, 31, 33, 63};

using By = std::uint32_t (*)(ff::CrcFold, std::uint32_t, const void*, std::size_t);
using Tables = std::uint32_t (*)(std::uint32_t, const void*, std::size_t);

std::vector<ff::CrcFold> folds() {
  std::vector<ff::CrcFold> found = {nullptr};
  for (const ff::Isa isa : {ff::Isa::v3, ff::Isa::v4}) {
    if (const ff::CrcFold fold = ff::crc_fold(isa)) found.push_back(fold);
  }
  return found;
}

std::vector<unsigned char> random_bytes(std::size_t size) {
  std::mt19937_64 random(3);
  std::vector<unsigned char> bytes(size);
  for (auto& byte : bytes) byte = static_cast<unsigned char>(random());
  return bytes;
}

void every_size_and_address(By by, Tables tables) {
  const std::vector<unsigned char> bytes = random_bytes(kMost + 64);
  for (const std::size_t offset : kOffsets) {
    const unsigned char* const from = bytes.data() + offset;
    std::uint32_t right = static_cast<std::uint32_t>(offset * 0x9E3779B9u);  // start register; 0 at offset 0
    const std::uint32_t begin = right;
    for (std::size_t size = 0; size <= kMost; ++size) {
      for (const ff::CrcFold fold : folds()) CHECK(by(fold, begin, from, size) == right);
      right = tables(right, from + size, 1);
    }
  }
}

void in_two_pieces(By by, Tables tables) {
  const std::vector<unsigned char> bytes = random_bytes(kMost);
  const std::uint32_t right = tables(0, bytes.data(), kMost);
  for (std::size_t cut = 0; cut <= kMost; ++cut) {
    for (const ff::CrcFold fold : folds())
      CHECK(by(fold, by(fold, 0, bytes.data(), cut), bytes.data() + cut, kMost - cut) == right);
  }
}

void combined() {
  const std::vector<unsigned char> bytes = random_bytes(kMost);
  const std::uint32_t right = ff::detail::crc32c_portable(0, bytes.data(), kMost);
  for (std::size_t cut = 0; cut <= kMost; ++cut) {
    for (const ff::CrcFold fold : folds()) {
      const std::uint32_t a = ff::detail::crc32c_by(fold, 0, bytes.data(), cut);
      const std::uint32_t b = ff::detail::crc32c_by(fold, 0, bytes.data() + cut, kMost - cut);
      CHECK(ff::crc32c_combine(a, b, kMost - cut) == right);
    }
  }
}

// Returns the width that a child process with FIREFLYER_ISA=`forced` uses; 0 if the child gets the error that names
// the invalid value.
int width_with(const char* forced) {
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    setenv("FIREFLYER_ISA", forced, 1);
    try {
      const int width = ff::crc_width();
      CHECK(std::string_view(forced).empty() || std::string_view(forced) == ff::name(ff::isa()));
      std::_Exit(width / 128);
    } catch (const ff::Error& error) {
      const std::string message = error.what();
      std::_Exit(message.starts_with("invalid FIREFLYER_ISA '" + std::string(forced) + "': expected ") ? 0 : 99);
    }
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
  return WEXITSTATUS(status) * 128;
}

void forced() {
  const bool wide = __builtin_cpu_supports("vpclmulqdq");
  CHECK(width_with("base") == 128);
  CHECK(width_with("v3") == (!ff::able(ff::Isa::v3) ? 0 : wide ? 256 : 128));
  CHECK(width_with("v4") == (!ff::able(ff::Isa::v4) ? 0 : wide ? 512 : 128));
  CHECK(width_with("") == width_with(ff::able(ff::Isa::v4) ? "v4" : ff::able(ff::Isa::v3) ? "v3" : "base"));
  CHECK(width_with("v5") == 0);
}

}  // namespace

int main() {
  every_size_and_address(ff::detail::crc32_by, ff::detail::crc32_portable);
  every_size_and_address(ff::detail::crc32c_by, ff::detail::crc32c_portable);
  in_two_pieces(ff::detail::crc32_by, ff::detail::crc32_portable);
  in_two_pieces(ff::detail::crc32c_by, ff::detail::crc32c_portable);
  combined();
  forced();
}
