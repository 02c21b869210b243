#include "fs3/io/permits.hpp"

#include <sys/eventfd.h>

#include <algorithm>

namespace ff::fs3::io {

bool Permits::ask(int wake) {
  std::lock_guard lock(mutex_);
  if (free_ != 0 && line_.empty()) {
    --free_;
    return true;
  }
  line_.push_back(wake);
  return false;
}

void Permits::give_back() {
  std::lock_guard lock(mutex_);
  if (line_.empty()) {
    ++free_;
    return;
  }
  ::eventfd_write(line_.front(), 1);
  line_.pop_front();
}

bool Permits::leave(int wake) {
  std::lock_guard lock(mutex_);
  const auto found = std::find(line_.begin(), line_.end(), wake);
  if (found == line_.end()) {
    eventfd_t told = 0;
    return ::eventfd_read(wake, &told) == 0;
  }
  line_.erase(found);
  return false;
}

}  // namespace ff::fs3::io
