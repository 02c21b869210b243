// Every part runs once, on any thread. An exception ends only the call of share() that it occurs in. A forked child has
// its own pool.
#include "base/process/worker_pool.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/testing/check.hpp"

namespace {

using ff::worker_pool::share;

void once_each(unsigned threads, std::size_t parts) {
  std::vector<std::atomic<int>> runs(parts);
  share(threads, parts, [&](std::size_t part) { ++runs[part]; });
  for (const auto& count : runs) CHECK(count == 1);
}

void throws(unsigned threads) {
  std::atomic<int> begun = 0;
  try {
    share(threads, 1000, [&](std::size_t part) {
      ++begun;
      if (part == 3) throw std::runtime_error("three");
    });
    CHECK(false);
  } catch (const std::runtime_error& error) {
    CHECK(std::string(error.what()) == "three" && begun >= 1);
  }
  once_each(threads, 100);
}

// Parts that wait for each other need as many threads as parts: all must run at once.
void at_once(unsigned threads) {
  std::atomic<unsigned> inside = 0;
  share(threads, threads, [&](std::size_t) {
    ++inside;
    inside.notify_all();
    for (unsigned seen = inside; seen < threads; seen = inside) inside.wait(seen);
  });
  CHECK(inside == threads);
}

}  // namespace

int main() {
  once_each(4, 0);
  once_each(1, 10);
  const pid_t child = ::fork();  // before there are threads, because the sanitizer allows no fork afterwards
  for (const unsigned threads : {2u, 4u, ff::worker_pool::kMost, 100u}) once_each(threads, 1000);
  throws(1);
  throws(4);
  at_once(4);
  at_once(ff::worker_pool::kMost);
  std::vector<std::thread> callers;
  for (int i = 0; i < 6; ++i) {
    callers.emplace_back([] {
      for (int round = 0; round < 200; ++round) once_each(3, 20);
    });
  }
  for (auto& caller : callers) caller.join();
  CHECK(ff::worker_pool::cores() >= 1);
  if (child == 0) ::_exit(0);
  int status;
  CHECK(::waitpid(child, &status, 0) == child && status == 0);
  return 0;
}
