// Python's signal handlers during native waits. An exception of a handler, such as KeyboardInterrupt, ends the wait.
//
// Only the main thread runs handlers. Other threads wait undisturbed.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <optional>

#include "base/process/interrupts.hpp"

namespace ff::signals {

constexpr double kCheckIntervalS = 0.05;  // maximum delay of a handler after its signal, in seconds

inline bool in_main_thread() {
  static thread_local const bool is = ::gettid() == ::getpid();
  return is;
}

// Calls wait(seconds) until it returns true or `seconds` have passed (< 0: no limit). Releases the GIL during the
// calls. Returns the result of the last call. REQUIRES: the caller holds the GIL.
template <class Wait>
bool wait_with_handlers(double seconds, const Wait& wait) {
  using Clock = std::chrono::steady_clock;
  if (!in_main_thread()) {
    const nanobind::gil_scoped_release released;
    return wait(seconds);
  }
  const auto begin = Clock::now();
  for (;;) {
    const double left = seconds - std::chrono::duration<double>(Clock::now() - begin).count();
    const bool last = seconds >= 0 && left <= kCheckIntervalS;
    bool over;
    {
      const nanobind::gil_scoped_release released;
      over = wait(last ? std::max(left, 0.0) : kCheckIntervalS);
    }
    if (PyErr_CheckSignals() != 0) throw nanobind::python_error();
    if (over || last) return over;
  }
}

// Calls work(), and releases the GIL meanwhile. Waits inside work() that call interrupts::check() end when a handler
// raises an exception; then this function throws that exception. REQUIRES: the caller holds the GIL.
template <class Work>
auto run_with_handlers(const Work& work) {
  std::optional<nanobind::python_error> raised;
  const auto look = [&raised] {
    const nanobind::gil_scoped_acquire held;
    if (PyErr_CheckSignals() == 0) return false;
    raised.emplace();
    return true;
  };
  const auto run = [&] {
    const nanobind::gil_scoped_release released;
    const interrupts::Scope scope(in_main_thread() ? interrupts::Interrupted(look) : interrupts::Interrupted());
    return work();
  };
  auto result = run();
  if (raised) throw std::move(*raised);
  return result;
}

}  // namespace ff::signals
