// A process group: the team of this host, the ring of this rank's lane, and the queue of operations.
//
// Thread contract: every method may be called from any thread. Operations run one at a time in the order of
// submission: in the submitting thread where it waits at once and nothing is queued, else in the group's own
// thread, which starts with the first queued operation and ends with the group.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "hfreduce/operation.hpp"
#include "hfreduce/ring.hpp"
#include "hfreduce/team.hpp"

namespace ff::hfreduce {

class Group {
 public:
  struct Config {
    int rank, world;
    double timeout_s;
    bool spin;
    // Between hosts: member i < lanes of each host's team owns lane i and has a ring; hosts > 1 needs lanes >= 1.
    std::size_t hosts = 1, lanes = 0;
  };

  // `team` may be null for a rank alone on its host, `ring` for one without a lane.
  Group(Config config, std::unique_ptr<Team> team, std::unique_ptr<Ring> ring);
  ~Group();  // aborts what runs
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // Sum or average in place. `data` must stay valid until the operation is done. With `run_here` the calling thread
  // does the work if nothing is queued, and the operation is done on return.
  std::shared_ptr<Operation> allreduce(void* data, std::size_t count, DType dtype, ReduceOp op,
                                       bool run_here);
  void abort();
  void set_timeout(double seconds) { timeout_s_ = seconds; }
  std::uint64_t network_bytes_sent() const { return ring_ ? ring_->bytes_sent() : 0; }

 private:
  void work();
  void run(Operation& operation);
  void execute(Operation& operation);
  void break_with(const Error& error);

  const Config config_;
  std::atomic<double> timeout_s_;
  std::unique_ptr<Team> team_;
  std::unique_ptr<Ring> ring_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Operation>> queue_;  // guarded by mutex_, as are the next three
  bool running_ = false;
  bool closing_ = false;
  std::optional<Error> broken_;                   // why no further operation can run
  std::thread thread_;
  std::uint64_t seq_ = 0;                         // of the running thread
};

}  // namespace ff::hfreduce
