#include "hfreduce/p2p/outgoing.hpp"

#include <algorithm>
#include <cstring>

namespace ff::hfreduce::mail {

void Outgoing::attach(int fd, bool local) {
  stream_.attach(fd);
  attached_ = true;
  local_ = local && !stream_.tcp();
  admit();
}

void Outgoing::close() {
  stream_.close();
  waiting_.clear();
  queue_.clear();
  for (const auto& [id, announced] : announced_) {
    if (announced.offer) offers_.withdraw(id, announced.offer->slot);
  }
  announced_.clear();
  unanswered_ = 0;
}

void Outgoing::post(const MessagePtr& send) {
  waiting_.push_back(send);
  admit();
}

void Outgoing::admit() {
  while (stream_.open() && !waiting_.empty() && unanswered_ < kAnnounced) {
    const MessagePtr send = std::move(waiting_.front());
    waiting_.pop_front();
    Frame frame;
    frame.header = {.kind = Kind::eager, .tag = send->tag, .bytes = send->bytes};
    frame.message = send;
    const std::size_t charge = send->bytes + kRecordBytes;
    if (send->bytes <= kEagerBytes && charge <= credit_) {
      credit_ -= charge;
      frame.body = send->data;
      frame.body_bytes = send->bytes;
    } else {
      frame = announce(send);
    }
    queue_.push_back(std::move(frame));
  }
}

Outgoing::Frame Outgoing::announce(const MessagePtr& send) {
  send->number = ++ids_;
  ++unanswered_;
  Frame frame;
  frame.header = {.kind = Kind::request, .tag = send->tag, .id = send->number, .bytes = send->bytes};
  frame.message = send;
  Announced& announced = announced_[send->number];
  announced.message = send;
  if (local_ && send->bytes > kEagerBytes) {
    announced.offer = offers_.make(send->number, send->data, send->bytes, frame.descriptors);
  }
  if (announced.offer) {
    frame.header.kind = Kind::offer;
    frame.copy = std::make_unique<char[]>(sizeof(Offer));
    std::memcpy(frame.copy.get(), &*announced.offer, sizeof(Offer));
    frame.body = frame.copy.get();
    frame.body_bytes = sizeof(Offer);
  }
  return frame;
}

void Outgoing::drop(Place at) {
  if (!at->second.cleared) --unanswered_;
  if (at->second.offer) offers_.free(at->second.offer->slot);
  announced_.erase(at);
}

void Outgoing::push_chunk(std::uint64_t id, const Announced& announced) {
  const std::size_t bytes = std::min(kChunk, announced.message->bytes - announced.sent);
  Frame frame;
  frame.header = {.kind = Kind::data, .id = id, .bytes = bytes};
  frame.message = announced.message;
  frame.body = announced.message->data + announced.sent;
  frame.body_bytes = bytes;
  queue_.push_back(std::move(frame));
}

bool Outgoing::withdraw(const MessagePtr& send) {
  if (std::erase(waiting_, send) > 0) return true;
  const auto at = announced_.find(send->number);
  const bool announced = at != announced_.end();
  const auto offer = announced ? at->second.offer : std::nullopt;
  if (offer && !offers_.withdraw(send->number, offer->slot)) return false;  // copied already; `done` is in flight
  bool retracted = false;  // no byte of the message was sent, and none will be
  for (auto frame = queue_.begin(); frame != queue_.end();) {
    if (frame->message != send) {
      ++frame;
    } else if (frame->written > 0) {
      auto copy = std::make_unique<char[]>(frame->body_bytes);
      if (frame->body_bytes > 0) std::memcpy(copy.get(), frame->body, frame->body_bytes);
      frame->copy = std::move(copy);
      frame->body = frame->copy.get();
      frame->message.reset();
      ++frame;
    } else {
      retracted = frame->header.kind != Kind::data;
      if (frame->header.kind == Kind::eager) credit_ += send->bytes + kRecordBytes;
      frame = queue_.erase(frame);
    }
  }
  if (!announced) return true;
  if (retracted && offer) offers_.retract(*offer);
  drop(at);
  if (!retracted) {
    queue_.emplace_back().header = {.kind = Kind::cancel, .tag = send->tag, .id = send->number};
  }
  admit();
  return true;
}

void Outgoing::write() {
  for (std::size_t budget = kSlice; stream_.open() && budget > 0 && !queue_.empty();) {
    Frame& frame = queue_.front();
    const std::size_t head = std::min(frame.written, sizeof(Header));
    const std::size_t body = frame.written - head;
    const std::size_t n =
        stream_.write(reinterpret_cast<const char*>(&frame.header) + head, sizeof(Header) - head, frame.body + body,
                      frame.body_bytes - body, frame.written == 0 ? frame.descriptors : std::vector<int>());
    if (n == 0) return;
    budget -= std::min(budget, n);
    frame.written += n;
    if (frame.written < sizeof(Header) + frame.body_bytes) continue;
    const Frame done = std::move(frame);
    queue_.pop_front();
    finish(done);
  }
}

void Outgoing::finish(const Frame& frame) {
  if (!frame.message) return;
  if (frame.header.kind == Kind::request || frame.header.kind == Kind::offer) return;
  if (frame.header.kind == Kind::eager) return ledger_.end(frame.message);
  const auto at = announced_.find(frame.header.id);
  at->second.sent += frame.body_bytes;
  if (at->second.sent < frame.message->bytes) return push_chunk(at->first, at->second);
  drop(at);
  ledger_.end(frame.message);
}

void Outgoing::read() {
  if (!stream_.open()) return;
  stream_.read(nullptr, 0);
  for (Header header; stream_.next(header);) answer(header);
}

void Outgoing::answer(const Header& header) {
  if (header.kind == Kind::credit) {
    if (header.bytes > kWindow - credit_) throw Malformed(peer_, "more credit than was used");
    credit_ += header.bytes;
    return admit();
  }
  if (header.kind != Kind::clear && header.kind != Kind::refuse && header.kind != Kind::done) {
    throw Malformed(peer_, "unknown answer");
  }
  const auto at = announced_.find(header.id);
  if (at == announced_.end()) return;  // withdrawn while the answer was in flight
  Announced& announced = at->second;
  if (announced.cleared) throw Malformed(peer_, "a second answer");
  if (header.kind == Kind::done && !announced.offer) throw Malformed(peer_, "nothing was offered");
  const MessagePtr send = announced.message;
  if (header.kind == Kind::clear && send->bytes > 0) {
    // The peer also answers `clear` to an offer whose memory it could not map. Then the payload goes over the socket.
    if (announced.offer) offers_.free(announced.offer->slot);
    announced.offer.reset();
    announced.cleared = true;
    --unanswered_;
    push_chunk(at->first, announced);
  } else {
    drop(at);
    if (header.kind == Kind::refuse) {
      ledger_.end(send, sizes_differ(send->tag, send->bytes, self_, header.bytes, peer_));
    } else {
      ledger_.end(send);
    }
  }
  admit();
}

}  // namespace ff::hfreduce::mail
