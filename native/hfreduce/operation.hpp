// One submitted call and its end.
//
// Shared by the submitter, who waits, and the engine, which completes it once. Every method may be called from any
// thread.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>

#include "base/error.hpp"
#include "hfreduce/types.hpp"

namespace ff::hfreduce {

class Operation {
 public:
  // True when it is over, false when `seconds` (< 0: no limit) passed before.
  bool wait(double seconds);
  bool done();
  void rethrow();  // REQUIRES: done. Throws the error of the operation, if any
  void complete(std::optional<Error> error);

  int source = -1;  // of a receive, once it is over: who sent

 private:
  friend class Group;
  char* data_ = nullptr;
  std::size_t count_ = 0;
  DType dtype_ = DType::f32;
  ReduceOp op_ = ReduceOp::sum;

  std::mutex mutex_;
  std::condition_variable over_;
  bool done_ = false;
  std::optional<Error> error_;
};

}  // namespace ff::hfreduce
