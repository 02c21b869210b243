// The sending half of the link to one peer: queue of frames, credit, announced messages.
//
// Thread contract: none of its own; Post's lock guards everything here.
// Invariants: messages are admitted (as eager frame or announcement) in the order of posting; a frame once begun is
// written to its end, if need be from a copy; at most one frame in the queue belongs to a message.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>

#include "hfreduce/post_matching.hpp"
#include "hfreduce/post_stream.hpp"

namespace ff::hfreduce::mail {

class Outgoing {
 public:
  Outgoing(int self, int peer, Ledger& ledger)
      : self_(self), peer_(peer), ledger_(ledger), stream_(peer) {}

  Stream& stream() { return stream_; }
  void attach(int fd);
  bool open() const { return stream_.open(); }
  bool attached() const { return attached_; }  // once and for all
  void close();                                // forgets all messages; their ends are the caller's

  void post(const MessagePtr& send);
  void withdraw(const MessagePtr& send);  // before the caller ends it early
  // Both move what can be moved without blocking. Throw Error(rank_failed, peer).
  void read();
  void write();
  bool wants_write() const { return !queue_.empty(); }

 private:
  struct Frame {
    Header header;
    MessagePtr message;          // nullptr: withdrawn, or none
    const char* body = nullptr;  // inside the message's bytes, or `copy`
    std::size_t body_bytes = 0;
    std::size_t written = 0;     // of header and body
    std::unique_ptr<char[]> copy;
  };
  struct Announced {
    MessagePtr message;
    bool cleared = false;
    std::size_t sent = 0;
  };

  void admit();
  void push_chunk(std::uint64_t id, const Announced& announced);
  void finish(const Frame& frame);
  void answer(const Header& header);

  const int self_, peer_;
  Ledger& ledger_;
  Stream stream_;
  bool attached_ = false;
  std::deque<MessagePtr> waiting_;  // not admitted yet
  std::deque<Frame> queue_;
  std::unordered_map<std::uint64_t, Announced> announced_;
  std::size_t unanswered_ = 0;  // of announced_
  std::size_t credit_ = kWindow;
  std::uint64_t ids_ = 0;
};

}  // namespace ff::hfreduce::mail
