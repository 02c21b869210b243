// Fuzzing driver for builds without libFuzzer: runs seeds 0, 1, ... for the given time.
//
//   NAME [SECONDS]   default 10        NAME seed N   repeat one seed
#pragma once

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "base/testing/check.hpp"

namespace ff {

template <class RunSeed>
int fuzz_main(int argc, char** argv, RunSeed run_seed) {
  if (argc > 2) return run_seed(std::strtoull(argv[2], nullptr, 10)), 0;
  const double seconds = argc > 1 ? std::strtod(argv[1], nullptr) : 10;
  // A child process runs the seeds, so that the seed is known however the child ends.
  auto* const seed = static_cast<volatile std::uint64_t*>(
      ::mmap(nullptr, sizeof(std::uint64_t), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  CHECK(seed != MAP_FAILED);
  const auto stop = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  const pid_t child = ::fork();
  CHECK(child >= 0);
  if (child == 0) {
    for (std::uint64_t next = 0; std::chrono::steady_clock::now() < stop; ++next) {
      *seed = next;
      run_seed(next);
    }
    ::_exit(0);
  }
  int status = 0;
  CHECK(::waitpid(child, &status, 0) == child);
  const auto last = static_cast<unsigned long long>(*seed);
  if (status != 0) {
    std::fprintf(stderr, "seed %llu is a finding: %s seed %llu\n", last, argv[0], last);
    return 1;
  }
  std::printf("seeds up to %llu without a finding\n", last);
  return 0;
}

}  // namespace ff
