// All links of a rank: which message goes to which, what is ready, who has gone. Nonblocking I/O
// only.
//
// Thread contract: Post's lock guards everything here but poll_fd(). Invariants: every message
// handed to admit() ends exactly once; once it has ended, its bytes are not touched. A peer that
// has gone ends the sends to it at once, the receives from it when all that it sent has been read.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "hfreduce/post_incoming.hpp"
#include "hfreduce/post_matching.hpp"
#include "hfreduce/post_outgoing.hpp"

namespace ff::hfreduce::mail {

class Courier {
 public:
  Courier(int rank, int world);
  ~Courier();
  Courier(const Courier&) = delete;
  Courier& operator=(const Courier&) = delete;

  // Own `fd`, also where they throw: Code::invalid for a link that is or was there.
  void add_outgoing(int rank, int fd, bool local);
  void add_incoming(int rank, int fd);
  void admit(const MessagePtr& message);
  bool heard_from(int rank) { return peer(rank).in.attached(); }  // a link from it is or was there
  void ready(std::uint64_t token, std::uint32_t events);  // as epoll reports them
  void expire(Clock::time_point now);
  bool busy() const { return !copying_.empty(); }  // copy() is due
  void copy();                                     // a slice for each peer that offers something
  void fail(const Error& error);  // ends all messages, now and later, and closes all links
  // Ends all messages, then the links so that peers can still read what was sent to its end.
  void leave(const Error& error);

  int poll_fd() const { return poll_fd_; }  // readable where ready() is due
  Ledger& ledger() { return ledger_; }

 private:
  enum Direction : std::uint64_t { kOut, kIn };
  struct Peer {
    Peer(int self, int rank, Matcher& matcher, Ledger& ledger)
        : out(self, rank, ledger), in(self, rank, matcher, ledger) {}
    Outgoing out;
    Incoming in;
    std::optional<Error> gone;       // why, once one direction has ended
    std::uint32_t armed[2] = {0, 0}; // by direction: what epoll watches
  };

  Peer& peer(int rank) { return *peers_[static_cast<std::size_t>(rank)]; }
  void add(int rank, int fd, Direction direction, bool local);
  void serve(int rank, Direction direction, bool readable);
  void arm(int rank, Direction direction);
  void lose(int rank, Direction direction, const Error& error);
  void end(const MessagePtr& message, const Error& error);
  void end_any_source();
  bool deserted() const;  // no rank is left that could send

  const int rank_;
  const int poll_fd_;
  Matcher matcher_;
  Ledger ledger_;
  std::vector<std::unique_ptr<Peer>> peers_;  // by rank; nullptr for this one
  std::set<int> copying_;  // peers
  std::optional<Error> broken_;
};

}  // namespace ff::hfreduce::mail
