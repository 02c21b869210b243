#include "hfreduce/p2p/incoming.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace ff::hfreduce::mail {

namespace {

// Returns the error of a receive whose sender cancelled. It names the sender, so that P2PEngine asks its Judge for the
// group's error, which takes precedence over this error.
Error gave_up(const Message& receive, int sender) {
  return Error(Code::deadline_exceeded, to_string(receive) + ": the sender's timeout passed", sender);
}

}  // namespace

void Incoming::attach(int fd) {
  stream_.attach(fd);
  attached_ = true;
}

void Incoming::close() {
  stream_.close();
  payload_ = {};
  transfers_.clear();
  copies_.clear();
  answers_.clear();
  answered_ = 0;
}

void Incoming::read() {
  for (std::size_t budget = kSlice; stream_.open() && budget > 0;) {
    // Dropped bytes pass through the stream's buffer.
    const std::size_t wanted = payload_.target == nullptr ? 0 : payload_.left;
    const Stream::Read got = stream_.read(payload_.target, wanted);
    payload_.left -= got.direct;
    if (got.direct > 0) payload_.target += got.direct;
    if (got.direct > 0 && payload_.left == 0) finish();
    parse();
    if (!got.full) return;
    budget -= std::min(budget, got.bytes);
  }
}

void Incoming::parse() {
  for (;;) {
    if (payload_.left > 0) {
      const std::size_t n = stream_.take(payload_.target, payload_.left);
      payload_.left -= n;
      if (payload_.target != nullptr) payload_.target += n;
      if (payload_.left > 0) return;
      finish();
    }
    Header header;
    if (!stream_.next(header)) return;
    begin(header);
  }
}

void Incoming::begin(const Header& header) {
  switch (header.kind) {
    case Kind::eager: return begin_eager(header);
    case Kind::request: return announce(header, std::nullopt);
    case Kind::offer:
      payload_.left = payload_.bytes = sizeof offer_;
      payload_.target = reinterpret_cast<char*>(&offer_);
      payload_.offer = header;
      return;
    case Kind::data: return begin_data(header);
    case Kind::cancel: return cancel(header);
    default: throw Malformed(peer_, "unknown frame");
  }
}

void Incoming::begin_eager(const Header& header) {
  if (header.bytes > kEagerBytes) throw Malformed(peer_, "an eager message that is too long");
  held_ += header.bytes + kRecordBytes;
  if (held_ > kWindow) throw Malformed(peer_, "more eager messages than it has credit for");
  payload_.left = payload_.bytes = header.bytes;
  if (const MessagePtr receive = matcher_.take(peer_, header.tag)) {
    receive->peer = peer_;
    if (receive->bytes == header.bytes) {
      payload_.receive = receive;
      payload_.target = receive->data;
    } else {
      ledger_.end(receive, sizes_differ(header.tag, header.bytes, peer_, receive->bytes, self_));
    }
  } else {
    const auto arrival = std::make_shared<Arrival>();
    arrival->peer = peer_;
    arrival->tag = header.tag;
    arrival->bytes = header.bytes;
    arrival->payload.reset(new char[header.bytes]);
    payload_.arrival = arrival;
    payload_.target = arrival->payload.get();
    matcher_.keep(arrival);
  }
  if (header.bytes == 0) finish();
}

void Incoming::begin_data(const Header& header) {
  const auto at = transfers_.find(header.id);
  if (at == transfers_.end()) throw Malformed(peer_, "a payload that was not asked for");
  Transfer& transfer = at->second;
  if (header.bytes == 0 || header.bytes > transfer.bytes - transfer.received) {
    throw Malformed(peer_, "a payload longer than announced");
  }
  payload_.left = payload_.bytes = header.bytes;
  payload_.transfer = header.id;
  if (transfer.receive) payload_.target = transfer.receive->data + transfer.received;
}

void Incoming::announce(const Header& header, const std::optional<Offer>& offer) {
  if (header.id <= last_id_) throw Malformed(peer_, "an announcement out of order");
  if (announced_ == kAnnounced) throw Malformed(peer_, "too many announcements");
  last_id_ = header.id;
  ++announced_;
  const auto arrival = std::make_shared<Arrival>();
  arrival->peer = peer_;
  arrival->tag = header.tag;
  arrival->id = header.id;
  arrival->bytes = header.bytes;
  if (offer) {
    offered_.map(*offer, stream_.take_descriptors(Offered::descriptors(*offer)));
    arrival->offer = offer;
    arrival->shared = offered_.find(*offer, header.bytes);
  }
  if (const MessagePtr receive = matcher_.take(peer_, header.tag)) {
    deliver(receive, arrival);
  } else {
    matcher_.keep(arrival);
  }
}

void Incoming::cancel(const Header& header) {
  if (header.id == 0) throw Malformed(peer_, "a cancelled message without a number");
  if (matcher_.withdraw(peer_, header.tag, header.id)) {
    --announced_;
    return;
  }
  const auto at = transfers_.find(header.id);
  if (at == transfers_.end()) return;  // refused while the cancel was in flight
  const MessagePtr receive = at->second.receive;
  transfers_.erase(at);
  if (!receive) return;
  ledger_.end(receive, gave_up(*receive, peer_));
}

void Incoming::finish() {
  const Payload done = std::exchange(payload_, {});
  if (done.offer) return announce(*done.offer, offer_);
  if (done.transfer != 0) {
    const auto at = transfers_.find(done.transfer);
    at->second.received += done.bytes;
    if (at->second.received < at->second.bytes) return;
    const MessagePtr receive = at->second.receive;
    transfers_.erase(at);
    if (receive) ledger_.end(receive);
    return;
  }
  if (done.arrival) {
    done.arrival->whole = true;
    if (!done.arrival->taken) return;
    if (const MessagePtr& receive = done.arrival->receive) fill(receive, *done.arrival);
  } else if (done.receive) {
    ledger_.end(done.receive);
  }
  taken(done.bytes);
}

void Incoming::fill(const MessagePtr& receive, const Arrival& arrival) {
  if (arrival.bytes > 0) std::memcpy(receive->data, arrival.payload.get(), arrival.bytes);
  ledger_.end(receive);
}

void Incoming::deliver(const MessagePtr& receive, const ArrivalPtr& arrival) {
  receive->peer = peer_;
  const bool fits = receive->bytes == arrival->bytes;
  if (!fits) {
    ledger_.end(receive, sizes_differ(arrival->tag, arrival->bytes, peer_, receive->bytes, self_));
  }
  if (arrival->id != 0) {
    --announced_;
    if (fits && arrival->shared != nullptr) {
      copies_.push_back({arrival, receive});
      return;
    }
    answer(
        {.kind = fits ? Kind::clear : Kind::refuse, .tag = arrival->tag, .id = arrival->id, .bytes = receive->bytes});
    if (!fits) return;
    if (arrival->bytes == 0) return ledger_.end(receive);
    transfers_.emplace(arrival->id, Transfer{receive, arrival->bytes});
  } else if (arrival->whole) {
    if (fits) fill(receive, *arrival);
    taken(arrival->bytes);
  } else {
    arrival->taken = true;
    if (fits) arrival->receive = receive;
  }
}

void Incoming::copy() {
  if (copies_.empty()) return;
  Copy& copy = copies_.front();
  const Arrival& from = *copy.arrival;
  if (copy.receive) {
    const std::size_t n = std::min(kSlice, from.bytes - copy.copied);
    std::memcpy(copy.receive->data + copy.copied, from.shared + copy.copied, n);
    copy.copied += n;
    if (copy.copied < from.bytes) return;
    if (offered_.claim(from.id, *from.offer)) {
      ledger_.end(copy.receive);
    } else {
      ledger_.end(copy.receive, gave_up(*copy.receive, peer_));
    }
  }
  answer({.kind = Kind::done, .tag = from.tag, .id = from.id});
  copies_.pop_front();
}

void Incoming::withdraw(const MessagePtr& receive) {
  if (payload_.receive == receive) {
    payload_.receive.reset();
    payload_.target = nullptr;
  }
  if (payload_.arrival && payload_.arrival->receive == receive) payload_.arrival->receive.reset();
  for (auto& copy : copies_) {
    if (copy.receive == receive) copy.receive.reset();
  }
  for (auto& [id, transfer] : transfers_) {
    if (transfer.receive != receive) continue;
    transfer.receive.reset();
    if (payload_.transfer == id) payload_.target = nullptr;
  }
}

void Incoming::taken(std::size_t eager_bytes) {
  taken_ += eager_bytes + kRecordBytes;
  if (taken_ < kWindow / 4) return;  // credit returns in large pieces: few frames, and the sender never runs out
  answer({.kind = Kind::credit, .bytes = taken_});
  held_ -= taken_;
  taken_ = 0;
}

void Incoming::answer(const Header& header) {
  if (!stream_.open()) return;
  const auto* bytes = reinterpret_cast<const char*>(&header);
  answers_.insert(answers_.end(), bytes, bytes + sizeof header);
}

void Incoming::write() {
  while (stream_.open() && answered_ < answers_.size()) {
    try {
      const std::size_t n = stream_.write(answers_.data() + answered_, answers_.size() - answered_, nullptr, 0);
      if (n == 0) return;
      answered_ += n;
    } catch (const Error&) {
      break;  // the peer reads no more answers, but bytes that it sent before may still be unread here
    }
  }
  answers_.clear();
  answered_ = 0;
}

}  // namespace ff::hfreduce::mail
