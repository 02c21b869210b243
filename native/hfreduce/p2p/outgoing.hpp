// The sending half of the link to one peer: queue of frames, credit, announced messages.
//
// Thread contract: not thread-safe; P2PEngine's lock guards everything here. Invariants: messages are admitted (as
// eager frame or announcement) in the order of posting. A frame that was begun is written to its end, if necessary from
// a copy. A message has at most one frame in the queue.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "hfreduce/p2p/frame_stream.hpp"
#include "hfreduce/p2p/matching.hpp"
#include "hfreduce/p2p/shared_offers.hpp"

namespace ff::hfreduce::mail {

class Outgoing {
 public:
  Outgoing(int self, int peer, Ledger& ledger) : self_(self), peer_(peer), ledger_(ledger), stream_(peer) {}

  Stream& stream() { return stream_; }
  void attach(int fd, bool local);  // local: the peer can map this process's arena
  bool open() const { return stream_.open(); }
  bool attached() const { return attached_; }  // stays true for ever
  void close();                                // forgets all messages; the caller must end them

  void post(const MessagePtr& send);
  // Must be called before the message is ended early. Returns false if the peer already has the message.
  bool withdraw(const MessagePtr& send);
  // Both move as many bytes as possible without blocking. Throw Error(rank_failed, peer).
  void read();
  void write();
  bool wants_write() const { return !queue_.empty(); }

 private:
  struct Frame {
    Header header;
    MessagePtr message;          // nullptr: the message was withdrawn, or the frame has no message
    const char* body = nullptr;  // inside the message's bytes, or `copy`
    std::size_t body_bytes = 0;
    std::size_t written = 0;  // of header and body
    std::unique_ptr<char[]> copy;
    std::vector<int> descriptors;  // sent with the first byte; owned by the arena and the offers
  };
  struct Announced {
    MessagePtr message;
    std::optional<Offer> offer;
    bool cleared = false;
    std::size_t sent = 0;
  };
  using Place = std::unordered_map<std::uint64_t, Announced>::iterator;

  void admit();
  Frame announce(const MessagePtr& send);
  void drop(Place at);
  void push_chunk(std::uint64_t id, const Announced& announced);
  void finish(const Frame& frame);
  void answer(const Header& header);

  const int self_, peer_;
  Ledger& ledger_;
  Stream stream_;
  Offers offers_;
  bool attached_ = false, local_ = false;
  std::deque<MessagePtr> waiting_;  // not admitted yet
  std::deque<Frame> queue_;
  std::unordered_map<std::uint64_t, Announced> announced_;
  std::size_t unanswered_ = 0;  // announced messages that the peer has not answered
  std::size_t credit_ = kWindow;
  std::uint64_t ids_ = 0;
};

}  // namespace ff::hfreduce::mail
