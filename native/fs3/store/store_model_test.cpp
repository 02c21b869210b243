// Random histories against a model: power cuts at any call, failing calls, lies. FIREFLYER_STORE_HISTORIES: how many;
// FIREFLYER_STORE_SEED: only that one.
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "fs3/store/model.hpp"

int main() {
  using ff::fs3::store::Model;
  const char* const only = std::getenv("FIREFLYER_STORE_SEED");
  const char* const many = std::getenv("FIREFLYER_STORE_HISTORIES");
  const std::uint64_t first = only ? std::strtoull(only, nullptr, 10) : 1;
  const std::uint64_t last = only ? first : many ? std::strtoull(many, nullptr, 10) : 2000;
  const auto begin = std::chrono::steady_clock::now();
  for (std::uint64_t seed = first; seed <= last; ++seed) {
    std::fprintf(stderr, "\rseed %llu ", static_cast<unsigned long long>(seed));  // the last one on failure
    Model(seed).run(60);
    Model(seed, true).run(60);
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::fprintf(stderr, "\n%.0f histories/s\n", 2 * static_cast<double>(last - first + 1) / seconds);
}
