// Matching of messages and receives, and the list of messages that have not ended. No I/O, no thread, no clock.
//
// Thread contract: not thread-safe; P2PEngine's lock guards everything here.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "hfreduce/engine/operation.hpp"
#include "hfreduce/host/waiting.hpp"
#include "hfreduce/p2p/shared_offers.hpp"

namespace ff::hfreduce::mail {

// One posted send or receive. Its bytes belong to the caller until the operation is over.
struct Message {
  std::shared_ptr<Operation> operation;
  bool sending = false;
  int peer = -1;  // of a receive from any source: -1 until it is matched
  std::uint64_t tag = 0;
  char* data = nullptr;  // sends only read it
  std::size_t bytes = 0;
  double seconds = 0;
  Clock::time_point deadline = Clock::time_point::max();

  std::uint64_t number = 0;  // of a receive: order of posting; of an announced send: its id
  bool over = false;
  std::list<std::shared_ptr<Message>>::iterator place;  // in the ledger
};
using MessagePtr = std::shared_ptr<Message>;

// Returns a text like "receiving 8 bytes (tag 5) from rank 2".
std::string to_string(const Message& message);
// Error for both ends of a message whose receive has another size.
Error sizes_differ(std::uint64_t tag, std::size_t sent, int from, std::size_t received, int to);

// A message that a peer sent or announced before its receive was posted.
struct Arrival {
  int peer = -1;
  std::uint64_t tag = 0;
  std::uint64_t id = 0;  // 0: an eager message
  std::size_t bytes = 0;
  std::unique_ptr<char[]> payload;  // of an eager message
  bool whole = false;               // all of it has been read
  std::optional<Offer> offer;       // of an announced message that can be copied from shared memory
  const char* shared = nullptr;
  bool taken = false;        // matched with a receive while its payload was still being read
  MessagePtr receive;        // that receive; nullptr if it ended early, or has another size
  std::uint64_t number = 0;  // order of arrival over all peers
};
using ArrivalPtr = std::shared_ptr<Arrival>;

// Matches messages and receives by (peer, tag), in the order of arrival and of posting. A receive from any source gets
// the earliest arrival of its tag.
class Matcher {
 public:
  // Removes and returns the first arrival that matches the receive. If there is none, keeps the receive.
  ArrivalPtr post(const MessagePtr& receive);
  // Removes and returns the first kept receive that matches a message of this peer and tag; nullptr if there is none.
  MessagePtr take(int peer, std::uint64_t tag);
  void keep(const ArrivalPtr& arrival);
  void withdraw(const MessagePtr& receive);
  bool withdraw(int peer, std::uint64_t tag, std::uint64_t id);  // withdraws a kept announcement; false: there was none
  void forget(int peer);                                         // drops incomplete arrivals of the peer

 private:
  using Key = std::pair<std::uint64_t, int>;  // (tag, peer); any source is peer -1
  std::map<Key, std::deque<MessagePtr>> posted_;
  std::map<Key, std::deque<ArrivalPtr>> arrived_;
  std::uint64_t posts_ = 0, arrivals_ = 0;
};

// List of the messages that have not ended, and of the ended ones that are not reported yet.
class Ledger {
 public:
  struct End {
    std::shared_ptr<Operation> operation;
    std::optional<Error> error;
  };

  void open(const MessagePtr& message);
  void end(const MessagePtr& message, std::optional<Error> error = std::nullopt);
  std::vector<MessagePtr> where(const std::function<bool(const Message&)>& holds) const;
  std::size_t size() const { return pending_.size(); }
  // A lower bound of all deadlines.
  Clock::time_point nearest() const { return nearest_; }
  std::vector<MessagePtr> late(Clock::time_point now);  // messages past their deadlines; recomputes nearest()
  std::vector<End> take_ends() { return std::exchange(ends_, {}); }

 private:
  std::list<MessagePtr> pending_;
  std::vector<End> ends_;
  Clock::time_point nearest_ = Clock::time_point::max();
};

}  // namespace ff::hfreduce::mail
