// Queue of new links of a transport: any thread adds sockets, and the thread that moves bytes takes them.
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

// Owns the sockets that are not taken yet, and guards them against forks.
class Arrivals {
 public:
  Arrivals() = default;
  ~Arrivals();
  Arrivals(const Arrivals&) = delete;
  Arrivals& operator=(const Arrivals&) = delete;

  // Makes the socket nonblocking and owns it, even if it throws. Throws Code::invalid for a link added before.
  void add(int rank, int fd, bool incoming);
  bool any() const { return any_; }
  std::vector<Arrival> take();  // the caller owns the sockets from here on

 private:
  std::mutex mutex_;
  std::vector<Arrival> waiting_;          // guarded by mutex_, as is known_
  std::set<std::pair<int, bool>> known_;  // all links ever added
  std::atomic<bool> any_ = false;
};

}  // namespace ff::hfreduce
