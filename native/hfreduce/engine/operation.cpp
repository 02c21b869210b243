#include "hfreduce/engine/operation.hpp"

#include <chrono>

namespace ff::hfreduce {

bool Operation::wait(double seconds) {
  std::unique_lock lock(mutex_);
  if (seconds < 0) {
    over_.wait(lock, [this] { return done_; });
    return true;
  }
  return over_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return done_; });
}

bool Operation::done() {
  const std::lock_guard lock(mutex_);
  return done_;
}

void Operation::rethrow() {
  const std::lock_guard lock(mutex_);
  if (error_) throw Error(*error_);
}

void Operation::complete(std::optional<Error> error) {
  const std::lock_guard lock(mutex_);
  error_ = std::move(error);
  done_ = true;
  over_.notify_all();
}

}  // namespace ff::hfreduce
