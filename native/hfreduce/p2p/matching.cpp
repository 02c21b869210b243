#include "hfreduce/p2p/matching.hpp"

#include <algorithm>

namespace ff::hfreduce::mail {
namespace {

template <class Map>
typename Map::mapped_type::value_type pop(Map& map, typename Map::iterator at) {
  auto first = std::move(at->second.front());
  at->second.pop_front();
  if (at->second.empty()) map.erase(at);
  return first;
}

}  // namespace

std::string to_string(const Message& message) {
  return (message.sending ? "sending " : "receiving ") + std::to_string(message.bytes) + " bytes (tag " +
         std::to_string(message.tag) + ") " + (message.sending ? "to " : "from ") +
         (message.peer < 0 ? "any rank" : "rank " + std::to_string(message.peer));
}

Error sizes_differ(std::uint64_t tag, std::size_t sent, int from, std::size_t received, int to) {
  return Error(Code::collective, "rank " + std::to_string(from) + " sends " + std::to_string(sent) + " bytes (tag " +
                                     std::to_string(tag) + "), rank " + std::to_string(to) + " receives " +
                                     std::to_string(received));
}

ArrivalPtr Matcher::post(const MessagePtr& receive) {
  auto best = arrived_.end();
  if (receive->peer >= 0) {
    best = arrived_.find({receive->tag, receive->peer});
  } else {
    for (auto at = arrived_.lower_bound({receive->tag, -1}); at != arrived_.end() && at->first.first == receive->tag;
         ++at) {
      if (best == arrived_.end() || at->second.front()->number < best->second.front()->number) {
        best = at;
      }
    }
  }
  if (best != arrived_.end()) return pop(arrived_, best);
  receive->number = posts_++;
  posted_[{receive->tag, receive->peer}].push_back(receive);
  return nullptr;
}

MessagePtr Matcher::take(int peer, std::uint64_t tag) {
  const auto exact = posted_.find({tag, peer}), any = posted_.find({tag, -1});
  if (exact == posted_.end()) return any == posted_.end() ? nullptr : pop(posted_, any);
  const bool later = any != posted_.end() && any->second.front()->number < exact->second.front()->number;
  return pop(posted_, later ? any : exact);
}

void Matcher::keep(const ArrivalPtr& arrival) {
  arrival->number = arrivals_++;
  arrived_[{arrival->tag, arrival->peer}].push_back(arrival);
}

void Matcher::withdraw(const MessagePtr& receive) {
  const auto at = posted_.find({receive->tag, receive->peer});
  if (at == posted_.end()) return;
  std::erase(at->second, receive);
  if (at->second.empty()) posted_.erase(at);
}

bool Matcher::withdraw(int peer, std::uint64_t tag, std::uint64_t id) {
  const auto at = arrived_.find({tag, peer});
  if (at == arrived_.end()) return false;
  const auto erased = std::erase_if(at->second, [id](const auto& a) { return a->id == id; });
  if (at->second.empty()) arrived_.erase(at);
  return erased > 0;
}

void Matcher::forget(int peer) {
  for (auto at = arrived_.begin(); at != arrived_.end();) {
    if (at->first.second == peer) std::erase_if(at->second, [](const auto& a) { return !a->whole; });
    at = at->second.empty() ? arrived_.erase(at) : std::next(at);
  }
}

void Ledger::open(const MessagePtr& message) {
  message->place = pending_.insert(pending_.end(), message);
  nearest_ = std::min(nearest_, message->deadline);
}

void Ledger::end(const MessagePtr& message, std::optional<Error> error) {
  if (message->over) return;
  message->over = true;
  if (!message->sending) message->operation->source = message->peer;
  ends_.push_back({message->operation, std::move(error)});
  pending_.erase(message->place);
}

std::vector<MessagePtr> Ledger::where(const std::function<bool(const Message&)>& holds) const {
  std::vector<MessagePtr> found;
  for (const auto& message : pending_) {
    if (holds(*message)) found.push_back(message);
  }
  return found;
}

std::vector<MessagePtr> Ledger::late(Clock::time_point now) {
  std::vector<MessagePtr> found;
  nearest_ = Clock::time_point::max();
  for (const auto& message : pending_) {
    if (message->deadline <= now) {
      found.push_back(message);
    } else {
      nearest_ = std::min(nearest_, message->deadline);
    }
  }
  return found;
}

}  // namespace ff::hfreduce::mail
