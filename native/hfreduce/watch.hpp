// Sees the death of any rank of a group and tells everybody.
//
// A rank watches the processes of its host by pidfds, and its neighbours by control links: duplex stream sockets
// to every rank of its host and to a few on other hosts, so that the links of all ranks form one connected graph.
// What a rank learns first it sends over all its links, and whoever hears of it for the first time does the same.
//
//   notice   meaning                                              what the others do
//   failed   the process of `rank` ended, or its link broke       RankFailed(rank) everywhere
//   broken   a rank gives the group up: timeout, desync, abort    the same error everywhere
//   left     `rank` said goodbye                                  nothing, until they wait for it
//   suspect  `rank` has waited too long for another              give up waiting, too, and say for whom
//   withdraw `rank` asks that an operation be cancelled           rank 0 settles whether it is; nothing else
//
// Thread contract: every method may be called from any thread. One thread of its own sleeps in the kernel until
// something happens; it alone calls the listener, with no lock held. A failure is sent to the neighbours before
// anybody here hears of it, so that a rank that ends because of it is not taken for the cause.
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
  static constexpr std::size_t kTextBytes = 1024;  // of an error's message at most; longer ones are cut

  struct Listener {
    std::function<void()> suspected = nullptr;              // once: somebody has waited too long
    std::function<void(const Error&)> failed = nullptr;     // once: why no operation can succeed any more
    std::function<void(std::uint64_t)> withdraw = nullptr;  // once an operation, by its number
  };

  Watch(int rank, int world);
  ~Watch();  // without leave(): the neighbours take it for a death
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  // Both own their descriptor, guard it against forks, and throw Code::invalid for a rank outside the group.
  void add_process(int rank, int pidfd);
  void add_link(int rank, int socket);

  // What has happened already is told too. Called once.
  void listen(Listener listener);

  // Gives the group up with an error that the engine found: sends it to all, unless another was first. Returns
  // the error that counts. An error that blames a rank is held back for up to 0.2 s: what the others have to say of it
  // comes first. Code::late blames a rank for being late: if that one waits for another itself, the last of the chain,
  // who waits for nobody, is blamed. The listener is told by the watch's own thread, also of this one.
  Error announce(const Error& error);

  // What counts where one call has failed because of a rank, and the group may go on: the error of the group, if
  // there is one or news of it are under way (up to 0.2 s), else `error`.
  Error verdict(const Error& error);

  // Asks all ranks, this one too, to cancel an operation; see Group.
  void withdraw(std::uint64_t operation);

  // Says goodbye and waits until the neighbours know, for at most `seconds`. What
  // happens to the others afterwards is of no interest.
  void leave(double seconds = 1.0);
  // Ends all links without a goodbye: the neighbours take it for a death.
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
  void tell_listener();
  Error culprit_of(std::unique_lock<std::mutex>& lock, const Error& late);
  int hear_of_blamed(std::unique_lock<std::mutex>& lock, const Error& error);
  void hear(Link& link);                                   // REQUIRES mutex_, as all below
  void process_ended(int pidfd);
  void parse(Link& link);
  bool heed(const Notice& notice, const Link* source);     // false: no such notice can be
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
  std::map<int, std::unique_ptr<Link>> links_;             // by socket
  std::map<int, int> processes_;                           // pidfd -> rank
  std::set<int> failed_;
  std::set<int> left_;
  std::optional<Error> failure_;
  Listener listener_;
  bool told_failure_ = false, told_suspicion_ = false, leaving_ = false, closing_ = false;
  std::map<int, int> suspects_;                            // who has waited too long -> for whom
  std::set<std::uint64_t> withdrawn_;                      // the latest, to know them when they come round again
  std::vector<std::uint64_t> untold_;                      // of them, what the listener has not heard yet
  std::thread thread_;
};

}  // namespace ff::hfreduce
