#include "hfreduce/transport/tcp.hpp"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <string>

#include "base/process/fork_guard.hpp"

namespace ff::hfreduce {
namespace {

constexpr std::size_t kVectors = 32;          // transfers per system call
constexpr std::size_t kCallBytes = 1u << 20;  // bytes per call; then other links get their turn

}  // namespace

TcpTransport::TcpTransport() {
  epoll_ = ::epoll_create1(EPOLL_CLOEXEC);
  wake_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  epoll_event event{};
  event.events = EPOLLIN;
  if (epoll_ < 0 || wake_ < 0 || ::epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &event) < 0) {
    const int error = errno;
    if (epoll_ >= 0) ::close(epoll_);
    if (wake_ >= 0) ::close(wake_);
    throw_errno("epoll", error);
  }
  fork_guard::add(epoll_);
  fork_guard::add(wake_);
}

TcpTransport::~TcpTransport() {
  for (const Links* links : {&outgoing_, &incoming_}) {
    for (const auto& [rank, link] : *links) {
      if (link->fd >= 0) fork_guard::close(link->fd);
    }
  }
  fork_guard::close(epoll_);
  fork_guard::close(wake_);
}

void TcpTransport::add_outgoing(int rank, int fd) { add(rank, fd, false); }
void TcpTransport::add_incoming(int rank, int fd) { add(rank, fd, true); }

void TcpTransport::add(int rank, int fd, bool incoming) {
  const int on = 1;  // the option has no effect on a Unix socket
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  arrivals_.add(rank, fd, incoming);
  wake();
}

void TcpTransport::adopt() {
  const std::vector<Arrival> arrivals = arrivals_.take();
  // All descriptors get their owning links before anything can throw.
  for (const auto& [rank, incoming, fd] : arrivals) {
    link_to(incoming ? incoming_ : outgoing_, rank, incoming).fd = fd;
  }
  for (const auto& [rank, incoming, fd] : arrivals) {
    epoll_event event{};
    event.events = (incoming ? EPOLLIN : EPOLLOUT) | EPOLLRDHUP | EPOLLET;
    event.data.ptr = &link_to(incoming ? incoming_ : outgoing_, rank, incoming);
    if (::epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) < 0) throw_errno("epoll");
  }
}

TcpTransport::Link& TcpTransport::link_to(Links& links, int rank, bool incoming) {
  std::unique_ptr<Link>& link = links[rank];
  if (link == nullptr) link = std::make_unique<Link>(Link{.rank = rank, .incoming = incoming});
  return *link;
}

void TcpTransport::send(int rank, Transfer& transfer) { post(link_to(outgoing_, rank, false), transfer); }

void TcpTransport::receive(int rank, Transfer& transfer) { post(link_to(incoming_, rank, true), transfer); }

void TcpTransport::post(Link& link, Transfer& transfer) {
  transfer.moved = 0;
  transfer.done = transfer.bytes == 0;
  if (transfer.done) return;
  if (link.queue.empty()) busy_.push_back(&link);
  link.queue.push_back(&transfer);
}

void TcpTransport::check() {
  if (failed_) throw Error(*failed_);
  if (aborted_) fail(Error(Code::collective, "the group was aborted"));
  if (arrivals_.any()) adopt();
}

void TcpTransport::fail(Error error) {
  failed_ = error;
  throw error;
}

bool TcpTransport::progress() {
  check();
  const auto blocked = [](const Link* link) { return !link->ready && link->fd >= 0; };
  if (std::any_of(busy_.begin(), busy_.end(), blocked)) poll(0, false);
  bool moved = false;
  for (Link* link : busy_) {
    if (link->ready) moved |= move(*link);
  }
  std::erase_if(busy_, [](const Link* link) { return link->queue.empty(); });
  return moved;
}

void TcpTransport::wait(std::chrono::milliseconds limit) {
  check();
  const auto ready = [](const Link* link) { return link->ready; };
  if (std::any_of(busy_.begin(), busy_.end(), ready)) return;
  poll(static_cast<int>(limit.count()), true);
}

// Only wait() consumes wakes: a wake before a progress() must still end the next wait().
void TcpTransport::poll(int timeout_ms, bool drain_wakes) {
  std::array<epoll_event, 64> events;
  const int n = ::epoll_wait(epoll_, events.data(), static_cast<int>(events.size()), timeout_ms);
  if (n < 0 && errno != EINTR) throw_errno("epoll");
  for (int i = 0; i < n; ++i) {
    const epoll_event& event = events[static_cast<std::size_t>(i)];
    auto* link = static_cast<Link*>(event.data.ptr);
    if (link != nullptr) {
      link->ready = true;
      link->ended |= (event.events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0;
    } else if (drain_wakes) {
      std::uint64_t wakes;
      [[maybe_unused]] const ssize_t got = ::read(wake_, &wakes, sizeof wakes);
    }
  }
}

// Makes one system call. REQUIRES: transfers are queued.
bool TcpTransport::move(Link& link) {
  if (link.ended && !link.incoming) fail(left(link.rank));
  std::array<iovec, kVectors> vectors;
  std::size_t used = 0, total = 0;
  for (const Transfer* transfer : link.queue) {
    if (used == kVectors || total >= kCallBytes) break;
    vectors[used] = {transfer->data + transfer->moved, transfer->bytes - transfer->moved};
    total += vectors[used++].iov_len;
  }
  msghdr message{};
  message.msg_iov = vectors.data();
  message.msg_iovlen = used;
  const ssize_t n = link.incoming ? ::recvmsg(link.fd, &message, MSG_DONTWAIT)
                                  : ::sendmsg(link.fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  if (n < 0 && errno == EINTR) return false;
  if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
    link.ready = false;
    return false;
  }
  if (n <= 0) fail(left(link.rank));
  if (!link.incoming) sent_ += static_cast<std::uint64_t>(n);
  // A short count means that the socket is drained or full, unless the end of the stream comes next.
  link.ready = static_cast<std::size_t>(n) == total || link.ended;
  for (std::size_t rest = static_cast<std::size_t>(n); rest > 0;) {
    Transfer& transfer = *link.queue.front();
    const std::size_t step = std::min(rest, transfer.bytes - transfer.moved);
    transfer.moved += step;
    rest -= step;
    transfer.done = transfer.moved == transfer.bytes;
    if (transfer.done) link.queue.pop_front();
  }
  return true;
}

void TcpTransport::wake() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t put = ::write(wake_, &one, sizeof one);
}

void TcpTransport::abort() {
  aborted_ = true;
  wake();
}

}  // namespace ff::hfreduce
