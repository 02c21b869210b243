#include "hfreduce/p2p/link_manager.hpp"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/process/fork_guard.hpp"

namespace ff::hfreduce::mail {
namespace {

constexpr auto kFarewell = std::chrono::milliseconds(200);  // maximum wait of leave()

int new_epoll() {
  const int fd = ::epoll_create1(EPOLL_CLOEXEC);
  if (fd < 0) throw_errno("cannot create an epoll descriptor");
  fork_guard::add(fd);
  return fd;
}

std::string decimals(double seconds) {
  std::string text = std::to_string(seconds);
  return text.substr(0, text.find('.') + 2);
}

}  // namespace

LinkManager::LinkManager(int rank, int world) : rank_(rank), poll_fd_(new_epoll()) {
  for (int r = 0; r < world; ++r) {
    peers_.push_back(r == rank ? nullptr : std::make_unique<Peer>(rank, r, matcher_, ledger_));
  }
}

LinkManager::~LinkManager() { fork_guard::close(poll_fd_); }

void LinkManager::add_outgoing(int rank, int fd, bool local) { add(rank, fd, kOut, local); }
void LinkManager::add_incoming(int rank, int fd) { add(rank, fd, kIn, false); }

void LinkManager::add(int rank, int fd, Direction direction, bool local) {
  const bool foreign = rank < 0 || rank == rank_ || rank >= static_cast<int>(peers_.size());
  if (foreign || broken_) {
    ::close(fd);
    if (foreign) throw Error(Code::invalid, "no link to rank " + std::to_string(rank) + " is possible");
    return;  // every message ends with the error broken_
  }
  Peer& p = peer(rank);
  if (direction == kOut ? p.out.attached() : p.in.attached()) {
    ::close(fd);
    throw Error(Code::invalid, "the link to rank " + std::to_string(rank) + " exists already");
  }
  epoll_event event{};
  event.events = p.armed[direction] = EPOLLIN;
  event.data.u64 = static_cast<std::uint64_t>(rank) * 2 + direction;
  if (::epoll_ctl(poll_fd_, EPOLL_CTL_ADD, fd, &event) != 0) {
    const int error = errno;
    ::close(fd);
    throw_errno("cannot watch the link to rank " + std::to_string(rank), error);
  }
  if (direction == kOut) {
    p.out.attach(fd, local);
  } else {
    p.in.attach(fd);
  }
  serve(rank, direction, false);
}

void LinkManager::ready(std::uint64_t token, std::uint32_t events) {
  serve(static_cast<int>(token / 2), static_cast<Direction>(token % 2),
        (events & ~static_cast<std::uint32_t>(EPOLLOUT)) != 0);
}

void LinkManager::serve(int rank, Direction direction, bool readable) {
  Peer& p = peer(rank);
  try {
    if (direction == kOut) {
      if (readable) p.out.read();
      p.out.write();
    } else {
      if (readable) p.in.read();
      p.in.write();
      if (p.in.copying()) copying_.insert(rank);
    }
  } catch (const Malformed& error) {
    lose(rank, kIn, error);
    lose(rank, kOut, error);
  } catch (const Error& error) {
    lose(rank, direction, error);
  }
  arm(rank, direction);
}

void LinkManager::arm(int rank, Direction direction) {
  Peer& p = peer(rank);
  Stream& stream = direction == kOut ? p.out.stream() : p.in.stream();
  if (!stream.open()) return;
  const bool write = direction == kOut ? p.out.wants_write() : p.in.wants_write();
  epoll_event event{};
  event.events = EPOLLIN | (write ? static_cast<std::uint32_t>(EPOLLOUT) : 0U);
  if (event.events == p.armed[direction]) return;
  p.armed[direction] = event.events;
  event.data.u64 = static_cast<std::uint64_t>(rank) * 2 + direction;
  ::epoll_ctl(poll_fd_, EPOLL_CTL_MOD, stream.fd(), &event);
}

void LinkManager::admit(const MessagePtr& message) {
  ledger_.open(message);
  if (broken_) return ledger_.end(message, broken_);
  if (message->sending) {
    Peer& p = peer(message->peer);
    if (p.gone && !p.out.open()) return ledger_.end(message, p.gone);
    const bool idle = !p.out.wants_write();  // otherwise epoll reports when the socket takes more bytes
    p.out.post(message);
    if (idle) serve(message->peer, kOut, false);
    return;
  }
  if (const ArrivalPtr arrival = matcher_.post(message)) {
    peer(arrival->peer).in.deliver(message, arrival);
    return serve(arrival->peer, kIn, false);
  }
  if (message->peer < 0) {
    if (no_sender_left()) end_any_source();
    return;
  }
  const Peer& p = peer(message->peer);
  if (p.gone && !p.in.open()) end(message, *p.gone);
}

void LinkManager::end(const MessagePtr& message, const Error& error) {
  if (message->over) return;
  if (message->sending) {
    if (!peer(message->peer).out.withdraw(message)) return ledger_.end(message);
  } else {
    matcher_.withdraw(message);
    if (message->peer >= 0) peer(message->peer).in.withdraw(message);
  }
  ledger_.end(message, error);
}

void LinkManager::lose(int rank, Direction direction, const Error& error) {
  Peer& p = peer(rank);
  if (!p.gone) p.gone = error;
  if (direction == kOut) {
    p.out.close();
  } else {
    p.in.close();
    matcher_.forget(rank);
  }
  // A direction without a link will never get a link now.
  const bool sends = !p.out.open(), receives = !p.in.open();
  const auto lost = ledger_.where(
      [&](const Message& message) { return message.peer == rank && (message.sending ? sends : receives); });
  for (const auto& message : lost) end(message, *p.gone);
  if (no_sender_left()) end_any_source();
}

bool LinkManager::no_sender_left() const {
  return std::all_of(peers_.begin(), peers_.end(),
                     [](const auto& p) { return p == nullptr || (p->gone && !p->in.open()); });
}

void LinkManager::end_any_source() {
  const auto lost = ledger_.where([](const Message& message) { return !message.sending && message.peer < 0; });
  for (const auto& message : lost) {
    end(message, Error(Code::collective, to_string(*message) + ": every other rank died or left"));
  }
}

void LinkManager::expire(Clock::time_point now) {
  if (now < ledger_.nearest()) return;
  for (const auto& message : ledger_.late(now)) {
    const int rank = message->peer;
    end(message, Error(Code::deadline_exceeded,
                       to_string(*message) + " timed out: it did not end within " + decimals(message->seconds) + " s"));
    if (rank >= 0) serve(rank, kOut, false);
  }
}

void LinkManager::copy() {
  for (const int rank : std::exchange(copying_, {})) {
    peer(rank).in.copy();
    serve(rank, kIn, false);
  }
}

void LinkManager::fail(const Error& error) {
  if (!broken_) broken_ = error;
  const auto all = ledger_.where([](const Message&) { return true; });
  for (const auto& message : all) ledger_.end(message, broken_);
  matcher_ = Matcher();
  for (const auto& p : peers_) {
    if (!p) continue;
    p->out.close();
    p->in.close();
  }
}

// Closing a TCP socket with unread bytes resets the connection and loses bytes in flight to the peer. So this function
// waits briefly for the peers, which close their ends when they have read all bytes.
void LinkManager::leave(const Error& error) {
  std::vector<pollfd> ends;
  for (const auto& p : peers_) {
    if (p && p->out.open() && p->out.stream().tcp()) {
      ends.push_back({p->out.stream().release(), POLLIN, 0});
    }
  }
  fail(error);
  for (const auto& end : ends) ::shutdown(end.fd, SHUT_WR);
  const auto until = Clock::now() + kFarewell;
  std::size_t open = ends.size();
  while (open > 0) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now());
    if (left.count() <= 0 || ::poll(ends.data(), ends.size(), static_cast<int>(left.count())) < 0) {
      break;
    }
    for (auto& end : ends) {
      char dropped[4096];
      if (end.fd < 0 || end.revents == 0) continue;
      if (::recv(end.fd, dropped, sizeof dropped, MSG_DONTWAIT) > 0) continue;
      fork_guard::close(end.fd);
      end.fd = -1;  // poll() ignores it
      --open;
    }
  }
  for (const auto& end : ends) {
    if (end.fd >= 0) fork_guard::close(end.fd);
  }
}

}  // namespace ff::hfreduce::mail
