// Failure detector: detects the death of any rank of a group and notifies all its ranks.
//
// A rank watches the processes of its host by pidfds, and its neighbours by control links: duplex stream sockets
// to every rank of its host and to a few on other hosts, so that the links of all ranks form one connected graph.
// Notices are flooded: a rank sends each of its own notices, and each notice that it receives for the first time, over
// all its links.
//
//   notice   meaning                                              what the receiving ranks do
//   failed   the process of `rank` ended, or its link broke       RankFailed(rank) everywhere
//   broken   a rank breaks the group: timeout, desync, abort      the same error everywhere
//   left     `rank` left the group in an orderly way              nothing, until they wait for `rank`
//   suspect  `rank` timed out waiting for another rank            they stop waiting, too, and name the awaited rank
//   withdraw `rank` asks to cancel an operation                   rank 0 decides; the other ranks: nothing
//
// Thread contract: every method may be called from any thread. The watch's own thread sleeps in the kernel until
// something happens; only that thread calls the listener, with no lock held. A failure is sent to the neighbours before
// any local caller sees it, so that a rank that exits because of the failure is not taken for its cause.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/error.hpp"

namespace ff::hfreduce {

class Watch {
 public:
  static constexpr std::size_t kTextBytes = 1024;  // maximum length of an error's message; a longer one is cut

  struct Listener {
    std::function<void()> suspected = nullptr;              // called once, when some rank has waited too long
    std::function<void(const Error&)> failed = nullptr;     // called once, with the error that ends all operations
    std::function<void(std::uint64_t)> withdraw = nullptr;  // called once for an operation, with its number
  };

  Watch(int rank, int world);
  ~Watch();  // closes all links; without a leave() before, the neighbours report that this rank died
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  // Both methods take ownership of the descriptor, guard it against forks, and throw Code::invalid for a rank outside
  // the group.
  void add_process(int rank, int pidfd);
  void add_link(int rank, int socket);

  // Sets the listener, which is also notified of events before this call. Called once.
  void listen(Listener listener);

  // Breaks the group with an error that the engine found: sends it to all ranks unless another error came first.
  // Returns the error to report. An error that blames a rank is held back for up to 0.2 s, because notices from other
  // ranks about that rank take precedence. Code::late blames a late rank. If that rank itself waits for another, the
  // last rank of the chain of waits is blamed. The watch's own thread notifies the listener of this error, too.
  Error announce(const Error& error);

  // Called when one call failed because of a rank and the group may continue. Returns the error to report: the group's
  // error if the group has failed or a notice of its failure arrives within 0.2 s, else `error`.
  Error verdict(const Error& error);

  // Asks all ranks, this one too, to cancel an operation; see Group.
  void withdraw(std::uint64_t operation);

  // Sends `left` and waits until the neighbours have received it, for at most `seconds`. Later events of the group
  // are ignored.
  void leave(double seconds = 1.0);
  // Closes all links without `left`, so the neighbours report that this rank died.
  void drop_links();

  std::optional<Error> failure() const;
  std::set<int> failed_ranks() const;  // known to be dead; a rank that was merely late is not
  std::set<int> left_ranks() const;
  // True once there is a failure; false when `seconds` (< 0: no limit) passed before.
  bool wait(double seconds) const;

 private:
  enum class Kind : std::uint8_t { failed = 1, broken = 2, left = 3, withdraw = 4, suspect = 5 };
  struct Notice;
  struct Link;

  void run();
  void notify_listener();
  Error culprit_of(std::unique_lock<std::mutex>& lock, const Error& late);
  int receive_about_blamed(std::unique_lock<std::mutex>& lock, const Error& error);
  void receive(Link& link);  // REQUIRES: mutex_ is held, as for all below
  void process_ended(int pidfd);
  void parse(Link& link);
  bool apply(const Notice& notice, const Link* source);  // false: the notice is malformed
  void fail(int rank, const std::string& why);
  void flood(const Notice& notice, const Link* source);
  void send(Link& link, const Notice& notice);
  void flush(Link& link);
  void close(Link& link);
  void poll(int fd, std::uint32_t events, bool again);
  void wake() const;

  const int rank_, world_;
  const unsigned generation_;
  int epoll_ = -1, event_ = -1;

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::map<int, std::unique_ptr<Link>> links_;  // by socket
  std::map<int, int> processes_;                // pidfd -> rank
  std::set<int> failed_;
  std::set<int> left_;
  std::optional<Error> failure_;
  Listener listener_;
  bool reported_failure_ = false, reported_suspicion_ = false, leaving_ = false, closing_ = false;
  std::map<int, int> suspects_;            // rank that waited too long -> rank it waited for
  std::set<std::uint64_t> withdrawn_;      // latest numbers, to recognize notices that arrive again
  std::vector<std::uint64_t> unreported_;  // withdrawn operations not yet passed to the listener
  std::thread thread_;
};

}  // namespace ff::hfreduce
