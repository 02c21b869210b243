// A process group: the team of this host, the links to other hosts, and the queue of operations.
//
// Thread contract: every method may be called from any thread. Operations run one at a time, by default in the order of
// submission. A thread that submits an operation and waits for it at once runs it itself, if nothing is queued.
// Otherwise the group's own thread runs the operation. That thread starts with the first queued operation and ends with
// the group.
//
// Among adjacent queued operations with a priority, the highest priority runs first. Rank 0 decides the order for all
// ranks, because ranks may see operations arrive at different times. An operation without priority is never overtaken
// and never overtakes. A prioritised operation can be withdrawn: if the request reaches rank 0 before rank 0 has
// decided that operation's turn, the operation ends as cancelled on all ranks. Otherwise it runs on all ranks.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>

#include "hfreduce/engine/operation.hpp"
#include "hfreduce/engine/recorder.hpp"
#include "hfreduce/host/team.hpp"
#include "hfreduce/schedule/hierarchy.hpp"
#include "hfreduce/transport/transport.hpp"

namespace ff::hfreduce {

enum class TransportKind { tcp, ucx };

class Group {
 public:
  struct Config {
    int rank, world;
    double timeout_s;
    Layout layout;  // all hosts
    TransportKind transport = TransportKind::tcp;
  };

  // `team` may be null for a rank alone on its host. Throws Error(collective) if there are several hosts and UCX is
  // chosen but unavailable.
  Group(Config config, std::unique_ptr<Team> team);
  ~Group();  // aborts the running operation
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // Pieces must stay valid until the operation is done. With `run_here`, if nothing is queued, the calling thread runs
  // the operation, which is done on return.
  std::shared_ptr<Operation> submit(Request request, bool run_here);
  void abort();
  // Ends the running operation and all later ones with this error, here and on the ranks that wait for this rank.
  void fail(const Error& error);
  // Makes waits for other ranks time out now, because some rank's timeout has passed. The error of each wait names the
  // rank that was waited for.
  void hurry() { hurried_ = true; }
  // Records a request of some rank to cancel the operation of this number. Has an effect on rank 0 only.
  void withdraw(std::uint64_t number);
  std::set<std::uint64_t> withdrawals();  // rank 0: operations that will end as cancelled when their turn comes
  std::optional<Error> failure();
  // Callback that announces a local failure to other hosts. Returns the error to report, which may be another rank's.
  using Announcer = std::function<Error(const Error&)>;
  void set_announcer(Announcer announcer);

  // Returns the ranks of other hosts that a call sends to; links to them must exist when the call is submitted.
  std::vector<int> peers(const Request& request);
  // Connected sockets for the payload; the group owns them from here on.
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
  const unsigned generation_;  // fork generation: a child's copy must not touch shared memory or links
  std::atomic<double> timeout_s_;
  std::atomic<bool> hurried_ = false;
  std::unique_ptr<Team> team_;
  std::unique_ptr<LinkedTransport> transport_;  // null with one host, as is hierarchy_
  std::unique_ptr<Hierarchy> hierarchy_;

  Recorder recorder_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Operation>> queue_;  // guarded by mutex_, as are all down to announcer_
  std::set<std::uint64_t> withdrawals_;           // rank 0: numbers of withdrawn operations whose turn is undecided
  bool running_ = false;
  bool closing_ = false;
  std::optional<Error> broken_;  // error of all further operations
  Announcer announcer_;
  std::thread thread_;
  std::uint64_t seq_ = 0;  // sequence number of the next call; only the thread that runs operations uses it
};

}  // namespace ff::hfreduce
