// Point-to-point messages between the ranks of a group: sends and receives with tags and any
// source, apart from the queue of the collectives, so that crossing messages never wait for one
// another.
//
// Thread contract: every method may be called from any thread. Messages move in the thread that
// posts them as far as nothing blocks, in a thread that waits for one (wait()), else in Post's own
// thread, which starts with the first link or message and ends with the object.
//
// A link is one stream socket, opened by the sender; messages go forward on it, answers come back:
//
//   up to 64 KiB, while the sender has credit            longer, or without credit
//   sender                        receiver               sender                        receiver
//     | eager {tag, bytes} payload -->|                    | request {tag, id, bytes} ---->|
//     | (done once written)           | meets its receive  |<------------------ clear {id} | has met its receive
//     |            ...                | or waits in        | data {id, bytes} payload ---->| straight into it
//     |<------------- credit {bytes}  | memory             | data ...  (chunks of 1 MiB)   |
//
// Between processes of one host long messages that lie in the arena are copied without the socket
// (post_shared.hpp). Every frame begins with mail::Header {magic, kind, tag, id, bytes}, 32 bytes,
// little-endian. Credit bounds the eager bytes that wait at a receiver to 8 MiB a sender. The
// receiver answers `refuse` where its receive has another size (both ends fail), the sender says
// `cancel` where its deadline passed (the receive fails if they had met).
//
// Messages of one sender and tag meet the receives for them in order. A send is over when its bytes
// may be reused. The end of a peer (EOF) ends the sends to it and, once all that it sent has been
// read, the receives from it with Error(rank_failed, rank); receives from any source end when no
// rank is left that could send.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "hfreduce/operation.hpp"
#include "hfreduce/post_courier.hpp"

namespace ff::hfreduce {

class Post {
 public:
  Post(int rank, int world);
  ~Post();  // ends every message. REQUIRES: no other call is running
  Post(const Post&) = delete;
  Post& operator=(const Post&) = delete;

  // A connected stream socket that this rank (outgoing) or `rank` (incoming) opened; owned from
  // here on, also where they throw Code::invalid (one link a direction and peer, for good).
  // Messages posted before wait for their link. `local`: a Unix socket to a process of this host;
  // long messages from the arena are copied once, by the receiver.
  void add_outgoing(int rank, int fd, bool local = false);
  void add_incoming(int rank, int fd);

  // `data` must stay valid until the operation is over. `seconds` <= 0: no deadline; else the
  // operation ends with Code::deadline_exceeded when they have passed, and no other is touched. A
  // receive must have the size of its message, else Code::collective; from -1 it takes the earliest
  // message of the tag, and Operation::source says whose. `attended`: the caller calls wait() next.
  // Both throw Code::invalid for a rank that is none or their own.
  std::shared_ptr<Operation> send(int to, std::uint64_t tag, const void* data, std::size_t bytes,
                                  double seconds, bool attended = false);
  std::shared_ptr<Operation> receive(int from, std::uint64_t tag, void* data, std::size_t bytes,
                                     double seconds, bool attended = false);
  // As Operation::wait(), but this thread moves the bytes meanwhile: no other needs to wake first.
  bool wait(Operation& operation, double seconds);

  // Who says what counts where the end of a peer has ended messages: the reason may be another's end. It may block
  // for a moment; called without a lock. Called once, before the first message.
  using Judge = std::function<Error(const Error&)>;
  void set_judge(Judge judge) { judge_ = std::move(judge); }

  // Whether `rank` has ever had a link to here. REQUIRES: another rank of the group.
  bool heard_from(int rank);

  // Ends every message, now and later, with this error, and closes the links.
  void fail(const Error& error);

 private:
  class Session;

  std::shared_ptr<Operation> submit(bool sending, int peer, std::uint64_t tag, char* data,
                                    std::size_t bytes, double seconds, bool attended);
  template <class Act>
  void with_courier(bool poller, const Act& act);
  void post_all(bool poller);
  void start();
  void kick();
  void turn(Clock::time_point until);
  bool visit();
  void leave();
  void rouse();
  bool take_over();
  void work();

  const int rank_, world_;
  const unsigned generation_;  // of forks
  const int kick_fd_;  // wakes the poller
  Judge judge_;

  std::mutex box_mutex_;
  std::vector<mail::MessagePtr> box_;  // posted, not yet with the courier; guarded by box_mutex_

  std::mutex mutex_;       // guards courier_; taken before the next
  mail::Courier courier_;

  // Who polls: one thread at a time, a visitor (in wait()) before our own. Guarded by role_mutex_.
  std::mutex role_mutex_;
  std::condition_variable role_changed_;
  bool visitor_ = false;
  bool polling_ = false;      // our thread is, or handles what it found
  bool sleeping_ = false;     // our thread waits for the visitor's end and must be told of it
  bool needed_ = false;       // our thread shall poll though a visitor was here just now
  bool closing_ = false;
  std::uint64_t visits_ = 0;
  std::thread thread_;

  std::atomic<bool> visited_{false};     // visitor_, for those who end operations
  std::atomic<bool> busy_{false};        // the courier has copies to do
  std::atomic<std::size_t> pending_{0};  // messages that have not ended, and ...
  std::atomic<Clock::time_point> nearest_{Clock::time_point::max()};  // ... before which none ends late
};

}  // namespace ff::hfreduce
