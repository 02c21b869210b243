// Random histories of a store against a model, on three kinds of disks: with failing calls, with writes that the disk
// silently loses or misplaces (lies), and with stored bytes that decay (rots). Power cuts come at any call.
// FIREFLYER_STORE_HISTORIES: number of histories. FIREFLYER_STORE_SEED: runs only the history of this seed.
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>

#include "base/testing/one_thread.hpp"

#include "fs3/store/model.hpp"

namespace ff::fs3::store {
namespace {

std::uint64_t running_seed = 0;

void say_seed(int) {  // prints the seed of the history that failed a CHECK
  char text[64];
  const int size = std::snprintf(text, sizeof text, "seed %llu\n", static_cast<unsigned long long>(running_seed));
  static_cast<void>(!::write(2, text, static_cast<std::size_t>(size)));
}

}  // namespace
}  // namespace ff::fs3::store

int main() {
  std::signal(SIGABRT, ff::fs3::store::say_seed);
  using ff::fs3::store::Model;
  const char* const only = std::getenv("FIREFLYER_STORE_SEED");
  const char* const many = std::getenv("FIREFLYER_STORE_HISTORIES");
  const std::uint64_t first = only ? std::strtoull(only, nullptr, 10) : 1;
  const std::uint64_t last = only ? first : many ? std::strtoull(many, nullptr, 10) : 300;
  const auto begin = std::chrono::steady_clock::now();
  for (std::uint64_t seed = first; seed <= last; ++seed) {
    ff::fs3::store::running_seed = seed;
    Model(seed).run(60);
    Model(seed, Model::Disk::lies).run(60);
    Model(seed, Model::Disk::rots).run(60);
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::fprintf(stderr, "%.0f histories/s\n", 3 * static_cast<double>(last - first + 1) / seconds);
}
