// All links of a rank: routes messages to links, tracks ready links and lost peers. Nonblocking I/O only.
//
// Thread contract: P2PEngine's lock guards everything here except poll_fd(). Invariants: every message passed to
// admit() ends exactly once; afterwards its bytes are not touched. The loss of a peer ends the sends to it at once, and
// the receives from it when all that it sent was read.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "hfreduce/p2p/incoming.hpp"
#include "hfreduce/p2p/matching.hpp"
#include "hfreduce/p2p/outgoing.hpp"

namespace ff::hfreduce::mail {

class LinkManager {
 public:
  LinkManager(int rank, int world);
  ~LinkManager();
  LinkManager(const LinkManager&) = delete;
  LinkManager& operator=(const LinkManager&) = delete;

  // Both take ownership of `fd`, even if they throw Code::invalid for a link that exists or existed.
  void add_outgoing(int rank, int fd, bool local);
  void add_incoming(int rank, int fd);
  void admit(const MessagePtr& message);                          // starts a send or a receive
  bool heard_from(int rank) { return peer(rank).in.attached(); }  // a link from `rank` exists or existed
  void ready(std::uint64_t token, std::uint32_t events);          // handles an event of poll_fd()
  void expire(Clock::time_point now);
  bool busy() const { return !copying_.empty(); }  // copy() is due
  void copy();                                     // copies a slice for each peer with a matched offer
  void fail(const Error& error);                   // ends all present and later messages, and closes all links
  // Ends all messages, then the links. Waits briefly, so that peers can still read all sent bytes.
  void leave(const Error& error);

  int poll_fd() const { return poll_fd_; }  // readable when ready() is due
  Ledger& ledger() { return ledger_; }

 private:
  enum Direction : std::uint64_t { kOut, kIn };
  struct Peer {
    Peer(int self, int rank, Matcher& matcher, Ledger& ledger)
        : out(self, rank, ledger), in(self, rank, matcher, ledger) {}
    Outgoing out;
    Incoming in;
    std::optional<Error> gone;        // the cause, once one direction has ended
    std::uint32_t armed[2] = {0, 0};  // by direction: events that epoll watches
  };

  Peer& peer(int rank) { return *peers_[static_cast<std::size_t>(rank)]; }
  void add(int rank, int fd, Direction direction, bool local);
  void serve(int rank, Direction direction, bool readable);
  void arm(int rank, Direction direction);
  void lose(int rank, Direction direction, const Error& error);
  void end(const MessagePtr& message, const Error& error);
  void end_any_source();
  bool no_sender_left() const;  // no rank is left that could send

  const int rank_;
  const int poll_fd_;
  Matcher matcher_;
  Ledger ledger_;
  std::vector<std::unique_ptr<Peer>> peers_;  // by rank; nullptr for this rank
  std::set<int> copying_;                     // peers
  std::optional<Error> broken_;
};

}  // namespace ff::hfreduce::mail
