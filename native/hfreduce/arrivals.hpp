// Links on their way to a transport: sockets that any thread brings, for the thread that moves bytes to adopt.
//
// Thread contract: add() and any() may be called from any thread.
#pragma once

#include <atomic>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

namespace ff::hfreduce {

struct Arrival {
  int rank;
  bool incoming;
  int fd;
};

// Owns the sockets that have not been taken, guarded against forks.
class Arrivals {
 public:
  Arrivals() = default;
  ~Arrivals();
  Arrivals(const Arrivals&) = delete;
  Arrivals& operator=(const Arrivals&) = delete;

  // Makes the socket nonblocking and owns it, also where it throws: Code::invalid for a link that is or was there.
  void add(int rank, int fd, bool incoming);
  bool any() const { return any_; }
  std::vector<Arrival> take();  // the caller owns the sockets from here on

 private:
  std::mutex mutex_;
  std::vector<Arrival> waiting_;          // guarded by mutex_, as is the next
  std::set<std::pair<int, bool>> known_;  // links that were added
  std::atomic<bool> any_ = false;
};

}  // namespace ff::hfreduce
