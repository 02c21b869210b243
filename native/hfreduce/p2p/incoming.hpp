// The receiving half of the link from one peer: reads frames, puts payloads into their places, sends answers.
//
// Thread contract: not thread-safe; P2PEngine's lock guards everything here. Invariants: a payload is read to its end
// even if its receive has ended, so the stream stays in order. At most kWindow of eager bytes (with kRecordBytes per
// message) and kAnnounced announcements are held for the peer.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <unordered_map>
#include <vector>

#include "hfreduce/p2p/frame_stream.hpp"
#include "hfreduce/p2p/matching.hpp"
#include "hfreduce/p2p/shared_offers.hpp"

namespace ff::hfreduce::mail {

class Incoming {
 public:
  Incoming(int self, int peer, Matcher& matcher, Ledger& ledger)
      : self_(self), peer_(peer), matcher_(matcher), ledger_(ledger), stream_(peer) {}

  Stream& stream() { return stream_; }
  void attach(int fd);
  bool open() const { return stream_.open(); }
  bool attached() const { return attached_; }  // stays true for ever
  void close();                                // forgets all receives; the caller must end them

  // Delivers `arrival`, which is from this peer, to `receive`. The matcher has already removed both.
  void deliver(const MessagePtr& receive, const ArrivalPtr& arrival);
  void withdraw(const MessagePtr& receive);  // must be called before a matched receive is ended early
  // Both move as many bytes as possible without blocking. read() throws Error(rank_failed, peer).
  void read();
  void write();
  bool wants_write() const { return !answers_.empty(); }
  bool copying() const { return !copies_.empty(); }
  void copy();  // copies a slice from shared memory

 private:
  struct Transfer {      // an announced message that was cleared
    MessagePtr receive;  // nullptr: withdrawn, the bytes are dropped
    std::size_t bytes = 0, received = 0;
  };
  struct Copy {
    ArrivalPtr arrival;
    MessagePtr receive;  // nullptr: withdrawn
    std::size_t copied = 0;
  };
  struct Payload {  // payload of the frame being read
    std::size_t left = 0, bytes = 0;
    char* target = nullptr;       // nullptr: dropped
    MessagePtr receive;           // of an eager message read directly into its receive
    ArrivalPtr arrival;           // of an eager message that came before its receive
    std::uint64_t transfer = 0;   // of an announced message: its id
    std::optional<Header> offer;  // header of an offer frame: the payload is its Offer
  };

  void parse();
  void begin(const Header& header);
  void begin_eager(const Header& header);
  void begin_data(const Header& header);
  void announce(const Header& header, const std::optional<Offer>& offer);
  void cancel(const Header& header);
  void finish();
  void fill(const MessagePtr& receive, const Arrival& arrival);
  void taken(std::size_t eager_bytes);
  void answer(const Header& header);

  const int self_, peer_;
  Matcher& matcher_;
  Ledger& ledger_;
  Stream stream_;
  bool attached_ = false;
  Payload payload_;
  std::unordered_map<std::uint64_t, Transfer> transfers_;
  Offer offer_;  // being read
  Offered offered_;
  std::deque<Copy> copies_;
  std::vector<char> answers_;
  std::size_t answered_ = 0;          // bytes of answers_ already written
  std::size_t held_ = 0, taken_ = 0;  // eager bytes whose credit was not returned; of these, bytes already received
  std::size_t announced_ = 0;         // announcements in the matcher
  std::uint64_t last_id_ = 0;
};

}  // namespace ff::hfreduce::mail
