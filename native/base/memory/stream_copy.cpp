#include "base/memory/stream_copy.hpp"

#include <emmintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace ff {
namespace {

constexpr std::size_t kLine = 64;
constexpr std::size_t kPage = 4096;  // copies below this size use memcpy: they displace little from the caches
// Pages that are copied side by side: the processor prefetches in several pages at once, but never across the end of
// a page.
constexpr std::size_t kPages = 4;
constexpr std::size_t kCompared = std::size_t{16} << 10;  // bytes compared at a time; a copy finds them in the L1 cache

inline void stream_line(char* to, const char* from) {
  const auto* const source = reinterpret_cast<const __m128i*>(from);
  auto* const target = reinterpret_cast<__m128i*>(to);
  const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
  const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
  _mm_stream_si128(target, a);
  _mm_stream_si128(target + 1, b);
  _mm_stream_si128(target + 2, c);
  _mm_stream_si128(target + 3, d);
}

}  // namespace

void stream_copy(char* to, const char* from, std::size_t bytes) {
  if (bytes < kPage) {
    if (bytes != 0) std::memcpy(to, from, bytes);  // an empty piece may have no address
    return;
  }
  const std::size_t head = (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine;
  std::memcpy(to, from, head);
  to += head, from += head, bytes -= head;
  for (; bytes >= kPages * kPage; to += kPages * kPage, from += kPages * kPage, bytes -= kPages * kPage) {
    for (std::size_t line = 0; line < kPage; line += kLine) {
      for (std::size_t page = 0; page < kPages; ++page)
        stream_line(to + page * kPage + line, from + page * kPage + line);
    }
  }
  for (; bytes >= kLine; to += kLine, from += kLine, bytes -= kLine) stream_line(to, from);
  std::memcpy(to, from, bytes);
}

bool stream_update(char* to, const char* from, std::size_t bytes) {
  bool differ = false;
  for (std::size_t at = 0; at < bytes; at += kCompared) {
    const std::size_t step = std::min(kCompared, bytes - at);
    if (std::memcmp(to + at, from + at, step) == 0) continue;
    differ = true;
    std::memcpy(to + at, from + at, step);  // the target is in the cache already
  }
  return differ;
}

void stream_fence() { _mm_sfence(); }

}  // namespace ff
