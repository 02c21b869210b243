#include "hfreduce/transport/arrivals.hpp"

#include <fcntl.h>

#include <string>

#include "base/error.hpp"
#include "base/process/fork_guard.hpp"

namespace ff::hfreduce {

Arrivals::~Arrivals() {
  for (const Arrival& arrival : waiting_) fork_guard::close(arrival.fd);
}

void Arrivals::add(int rank, int fd, bool incoming) {
  fork_guard::add(fd);
  try {
    const int flags = ::fcntl(fd, F_GETFL);
    if (flags < 0 || ::fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0) throw_errno("cannot set up the socket of a link");
    const std::lock_guard lock(mutex_);
    if (!known_.insert({rank, incoming}).second) {
      throw Error(Code::invalid, std::string("there is a link ") + (incoming ? "from" : "to") + " rank " +
                                     std::to_string(rank) + " already");
    }
    waiting_.push_back({rank, incoming, fd});
    any_ = true;
  } catch (...) {
    fork_guard::close(fd);
    throw;
  }
}

std::vector<Arrival> Arrivals::take() {
  const std::lock_guard lock(mutex_);
  any_ = false;
  return std::exchange(waiting_, {});
}

}  // namespace ff::hfreduce
