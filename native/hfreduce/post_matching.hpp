// Which message meets which receive, and which messages have not ended. No I/O, no thread, no
// clock.
//
// Thread contract: none of its own; Post's lock guards everything here.
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

#include "hfreduce/operation.hpp"
#include "hfreduce/post_shared.hpp"
#include "hfreduce/waiting.hpp"

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

// "receiving 8 bytes (tag 5) from rank 2"
std::string to_string(const Message& message);
// What both ends of a message are told where the receive has another size.
Error sizes_differ(std::uint64_t tag, std::size_t sent, int from, std::size_t received, int to);

// What a peer sent or announced before a receive asked for it.
struct Arrival {
  int peer = -1;
  std::uint64_t tag = 0;
  std::uint64_t id = 0;  // 0: an eager message
  std::size_t bytes = 0;
  std::unique_ptr<char[]> payload;  // of an eager message
  bool whole = false;               // all of it has been read
  std::optional<Offer> offer;       // of an announced message whose bytes can be copied from `shared`
  const char* shared = nullptr;
  bool taken = false;               // no longer matched, though its payload is still being read ...
  MessagePtr receive;               // ... for this receive, if that has not ended meanwhile
  std::uint64_t number = 0;         // order of arrival over all peers
};
using ArrivalPtr = std::shared_ptr<Arrival>;

// Matches by (peer, tag), first come first served on both sides; a receive from any source is
// served by the earliest arrival of its tag.
class Matcher {
 public:
  // The arrival that serves the receive; none: the receive is kept.
  ArrivalPtr post(const MessagePtr& receive);
  // The receive that waits for such a message, if any.
  MessagePtr take(int peer, std::uint64_t tag);
  void keep(const ArrivalPtr& arrival);
  void withdraw(const MessagePtr& receive);
  bool withdraw(int peer, std::uint64_t tag, std::uint64_t id);  // a kept announcement: was there one?
  void forget(int peer);  // arrivals of the peer that will never be whole

 private:
  using Key = std::pair<std::uint64_t, int>;  // (tag, peer); any source is peer -1
  std::map<Key, std::deque<MessagePtr>> posted_;
  std::map<Key, std::deque<ArrivalPtr>> arrived_;
  std::uint64_t posts_ = 0, arrivals_ = 0;
};

// The messages that have not ended, and the ends that have not been told.
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
  // No deadline passes before this time; it may lie before the first one.
  Clock::time_point nearest() const { return nearest_; }
  std::vector<MessagePtr> late(Clock::time_point now);  // sets nearest() anew
  std::vector<End> take_ends() { return std::exchange(ends_, {}); }

 private:
  std::list<MessagePtr> pending_;
  std::vector<End> ends_;
  Clock::time_point nearest_ = Clock::time_point::max();
};

}  // namespace ff::hfreduce::mail
