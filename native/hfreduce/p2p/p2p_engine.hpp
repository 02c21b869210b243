// Point-to-point messages between the ranks of a group: sends and receives with tags and any source. They bypass the
// queue of the collectives, so that two ranks that send to each other at the same time do not deadlock.
//
// Thread contract: every method may be called from any thread. The posting thread moves a message until it would block.
// Then a thread in wait() moves all messages; if there is none, P2PEngine's own thread does. That thread starts with
// the first link or message and ends with the object.
//
// A link is one stream socket, opened by the sender; messages go forward on it, answers come back:
//
//   up to 64 KiB, while the sender has credit            longer, or without credit
//   sender                        receiver               sender                        receiver
//     | eager {tag, bytes} payload -->|                    | request {tag, id, bytes} ---->|
//     | (done once written)           | matches a receive  |<------------------ clear {id} | has matched a receive
//     |            ...                | or waits in        | data {id, bytes} payload ---->| into its memory
//     |<------------- credit {bytes}  | memory             | data ...  (chunks of 1 MiB)   |
//
// Between processes of one host, long messages in the arena are copied without the socket (shared_offers.hpp). Every
// frame begins with mail::Header {magic, kind, tag, id, bytes}, 32 bytes, little-endian. Credit bounds the eager bytes
// that wait at a receiver to 8 MiB per sender. The receiver answers `refuse` if its receive has another size (both ends
// fail). The sender sends `cancel` if its deadline passed (a matched receive fails).
//
// Messages of one sender and tag match their receives in order. A send is over when its bytes may be reused. The end of
// a peer (EOF) ends the sends to it with Error(rank_failed, rank). The receives from it end with the same error once
// all bytes that it sent are read. Receives from any source end when no rank is left that could send.
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

#include "hfreduce/engine/operation.hpp"
#include "hfreduce/p2p/link_manager.hpp"

namespace ff::hfreduce {

class P2PEngine {
 public:
  P2PEngine(int rank, int world);
  ~P2PEngine();  // ends every message. REQUIRES: no other call is running
  P2PEngine(const P2PEngine&) = delete;
  P2PEngine& operator=(const P2PEngine&) = delete;

  // Takes ownership of a connected stream socket that this rank (outgoing) or `rank` (incoming) opened, even if it
  // throws. Throws Code::invalid for a second link of a direction and peer. A message that is posted before its link
  // exists waits for the link. `local`: a Unix socket to a process of this host; long messages from the arena are then
  // copied once, by the receiver.
  void add_outgoing(int rank, int fd, bool local = false);
  void add_incoming(int rank, int fd);

  // `data` must stay valid until the operation is over. `seconds` <= 0: no deadline; else the operation ends with
  // Code::deadline_exceeded after `seconds`, and no other operation is affected. A receive must have the size of its
  // message, else Code::collective. A receive from rank -1 takes the earliest message of the tag from any rank, and
  // Operation::source names the sender. `attended`: the caller calls wait() next. Both throw Code::invalid for an
  // unknown rank and for this rank itself.
  std::shared_ptr<Operation> send(int to, std::uint64_t tag, const void* data, std::size_t bytes, double seconds,
                                  bool attended = false);
  std::shared_ptr<Operation> receive(int from, std::uint64_t tag, void* data, std::size_t bytes, double seconds,
                                     bool attended = false);
  // Like Operation::wait(), but this thread moves the bytes meanwhile, so no other thread needs to wake first.
  bool wait(Operation& operation, double seconds);

  // Callback that returns the error to report for messages that ended because a peer ended: the cause may be the end of
  // another rank. It may block briefly; P2PEngine calls it without a lock. Call set_judge once, before the first
  // message.
  using Judge = std::function<Error(const Error&)>;
  void set_judge(Judge judge) { judge_ = std::move(judge); }

  // True if `rank` has ever had a link to this rank. REQUIRES: another rank of the group.
  bool heard_from(int rank);

  // Ends all present and later messages with this error, and closes the links.
  void fail(const Error& error);

 private:
  class Session;

  std::shared_ptr<Operation> submit(bool sending, int peer, std::uint64_t tag, char* data, std::size_t bytes,
                                    double seconds, bool attended);
  template <class Act>
  void with_links(bool poller, const Act& act);
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
  const unsigned generation_;  // fork generation
  const int kick_fd_;          // wakes the poller
  Judge judge_;

  std::mutex box_mutex_;
  std::vector<mail::MessagePtr> box_;  // posted messages that the link manager lacks; guarded by box_mutex_

  std::mutex mutex_;  // guards links_
  mail::LinkManager links_;

  // The polling role, guarded by role_mutex_. One thread at a time has it; a visitor (a thread in wait()) takes
  // precedence over P2PEngine's own thread.
  std::mutex role_mutex_;
  std::condition_variable role_changed_;
  bool visitor_ = false;
  bool polling_ = false;   // the engine's own thread polls, or handles events
  bool sleeping_ = false;  // the engine's own thread sleeps until the visitor leaves and notifies it
  bool needed_ = false;    // the engine's own thread must poll, although a visitor has just left
  bool closing_ = false;
  std::uint64_t visits_ = 0;
  std::thread thread_;

  std::atomic<bool> visited_{false};     // copy of visitor_, for threads that end operations
  std::atomic<bool> busy_{false};        // the link manager has copies to do
  std::atomic<std::size_t> pending_{0};  // messages that have not ended
  std::atomic<Clock::time_point> nearest_{Clock::time_point::max()};  // before this time no deadline passes
};

}  // namespace ff::hfreduce
