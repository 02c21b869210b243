// A process group: the team of this host, the links to other hosts, and the queue of operations.
//
// Thread contract: every method may be called from any thread. Operations run one at a time, by default in the order of
// submission: in the submitting thread where it waits at once and nothing is queued, else in the group's own
// thread, which starts with the first queued operation and ends with the group. Of prioritised operations that wait
// side by side the highest runs first: rank 0 settles it for all ranks, since they may see them come at different
// times. Nothing overtakes, or is overtaken by, an operation without priority. A prioritised operation can be withdrawn:
// if rank 0 hears of it before it has settled its turn, it ends as cancelled on all ranks, and on none otherwise.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>

#include "hfreduce/hierarchy.hpp"
#include "hfreduce/operation.hpp"
#include "hfreduce/recorder.hpp"
#include "hfreduce/team.hpp"
#include "hfreduce/transport.hpp"

namespace ff::hfreduce {

enum class TransportKind { tcp, ucx };

class Group {
 public:
  struct Config {
    int rank, world;
    double timeout_s;
    Layout layout;  // of all hosts
    TransportKind transport = TransportKind::tcp;
  };

  // `team` may be null for a rank alone on its host. Throws Error(collective) with several hosts where UCX is
  // chosen and not to be had.
  Group(Config config, std::unique_ptr<Team> team);
  ~Group();  // aborts what runs
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // Pieces must stay valid until the operation is done. With `run_here` the calling thread does the work if nothing
  // is queued, and the operation is done on return.
  std::shared_ptr<Operation> submit(Request request, bool run_here);
  void abort();
  // Ends what runs and all that follows with this error, here and on the ranks that wait for this one.
  void fail(const Error& error);
  // What waits for another rank gives up now and says for which: somebody's time has passed already.
  void hurry() { hurried_ = true; }
  // Somebody asks that the operation of this number be withdrawn. Without effect on other ranks than 0.
  void withdraw(std::uint64_t number);
  std::set<std::uint64_t> withdrawals();  // rank 0: what will end as cancelled when its turn comes
  std::optional<Error> failure();
  // How other hosts hear of a failure that was found here: returns the error that counts, which may be another's.
  using Announcer = std::function<Error(const Error&)>;
  void set_announcer(Announcer announcer);

  // The ranks of other hosts that a call sends to; links to them must be there when it is submitted.
  std::vector<int> peers(const Request& request);
  // Connected sockets for the payload; owned by the group from here on.
  void add_outgoing(int rank, int fd);
  void add_incoming(int rank, int fd);
  void set_rules(std::vector<Rule> rules);
  std::vector<Record> records() const { return recorder_.records(); }  // the last operations
  std::uint64_t network_bytes_sent() const { return transport_ ? transport_->bytes_sent() : 0; }
  void set_timeout(double seconds) { timeout_s_ = seconds; }

 private:
  void work();
  std::shared_ptr<Operation> next(std::unique_lock<std::mutex>& lock);
  std::uint64_t choose_next() const;
  std::uint64_t settle_next(std::uint64_t chosen);
  Deadline deadline(double seconds = 0) const;  // 0: the group's timeout
  void run(Operation& operation);
  void execute(Operation& operation);
  void await_device(const Staging& staging);
  void break_with(const Error& error);
  Error cause_of(const Error& caught);

  const Config config_;
  const unsigned generation_;                // of forks: a copy in a child must not touch what the parent shares
  std::atomic<double> timeout_s_;
  std::atomic<bool> hurried_ = false;
  std::unique_ptr<Team> team_;
  std::unique_ptr<LinkedTransport> transport_;  // null with one host, as is the next
  std::unique_ptr<Hierarchy> hierarchy_;

  Recorder recorder_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Operation>> queue_;  // guarded by mutex_, as are the next five
  std::set<std::uint64_t> withdrawals_;           // rank 0: numbers whose turn is not settled yet
  bool running_ = false;
  bool closing_ = false;
  std::optional<Error> broken_;                   // why no further operation can run
  Announcer announcer_;
  std::thread thread_;
  std::uint64_t seq_ = 0;                         // of the running thread
};

}  // namespace ff::hfreduce
