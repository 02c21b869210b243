// Ends waits of a thread whose caller was interrupted, for example by Ctrl-C.
//
// A thread that does work for its caller opens a Scope. Every loop that waits inside the scope calls check() at least
// every 50 ms.
#pragma once

#include <functional>
#include <string>
#include <utility>

#include "base/error.hpp"

namespace ff::interrupts {

using Interrupted = std::function<bool()>;

inline thread_local const Interrupted* current = nullptr;

// Makes check() ask `interrupted`, which returns true once after the caller was interrupted. With an empty function,
// check() never throws. Scopes of a thread do not nest.
class Scope {
 public:
  explicit Scope(Interrupted interrupted) : interrupted_(std::move(interrupted)) {
    if (interrupted_) current = &interrupted_;
  }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
  ~Scope() { current = nullptr; }

 private:
  const Interrupted interrupted_;
};

// Throws Code::rank_failed if the caller of this thread's work was interrupted. `rank` is the rank of this process.
inline void check(int rank) {
  if (current == nullptr || !(*current)()) return;
  throw Error(Code::rank_failed, "rank " + std::to_string(rank) + " was interrupted by a signal", rank);
}

}  // namespace ff::interrupts
