#include "hfreduce/engine/watch.hpp"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "base/process/fork_guard.hpp"
#include "base/process/thread_cpus.hpp"

namespace ff::hfreduce {
namespace {

constexpr std::uint32_t kMagic = 0x31776666;               // "ffw1"
constexpr auto kVerdict = std::chrono::milliseconds(200);  // wait for other ranks' notices before an error is reported
constexpr std::size_t kWithdrawals = 4096;                 // maximum number of remembered withdrawals
constexpr Code kLastCode = Code::rank_failed;

// Sets keep-alive and timeouts, so that the links of a vanished host end after about 15 s.
void prepare(int socket) {
  ::fcntl(socket, F_SETFL, ::fcntl(socket, F_GETFL) | O_NONBLOCK);
  int domain = 0;
  socklen_t size = sizeof domain;
  ::getsockopt(socket, SOL_SOCKET, SO_DOMAIN, &domain, &size);
  if (domain == AF_UNIX) return;
  const auto set = [&](int level, int option, int value) { ::setsockopt(socket, level, option, &value, sizeof value); };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 5);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 2);
  set(IPPROTO_TCP, TCP_KEEPCNT, 5);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, 15'000);
}

std::string name(int rank) { return "rank " + std::to_string(rank); }

}  // namespace

// Message between ranks. The links carry the fields before `text`, then the first `bytes` bytes of `text`.
struct Watch::Notice {
  std::uint32_t magic = kMagic;
  Kind kind{};
  std::uint8_t code = 0;
  std::uint16_t bytes = 0;
  std::int32_t rank = -1;
  std::uint32_t reserved = 0;
  std::uint64_t operation = 0;  // withdraw: number of the operation; suspect: the rank that was waited for
  char text[kTextBytes] = {};

  static Notice of(Kind kind, const Error& error) {
    Notice notice;
    notice.kind = kind;
    notice.code = static_cast<std::uint8_t>(error.code());
    notice.rank = error.rank();
    const char* text = error.what();
    std::size_t bytes = std::min(std::strlen(text), kTextBytes);
    while (bytes > 0 && (text[bytes] & 0xC0) == 0x80) --bytes;  // never cuts within a character
    notice.bytes = static_cast<std::uint16_t>(bytes);
    std::memcpy(notice.text, text, bytes);
    return notice;
  }
  Code code_of() const { return static_cast<Code>(code); }
  Error error() const { return Error(code_of(), std::string(text, bytes), rank); }
  std::size_t size() const { return offsetof(Notice, text) + bytes; }
};

struct Watch::Link {
  int rank, socket;
  std::string in{}, out{};
  bool left_queued = false;  // the last item of `out` is the `left` notice
};

Watch::Watch(int rank, int world) : rank_(rank), world_(world), generation_(fork_guard::generation()) {
  epoll_ = ::epoll_create1(EPOLL_CLOEXEC);
  if (epoll_ < 0) throw_errno("cannot create an epoll instance");
  event_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (event_ < 0) {
    const int error = errno;
    ::close(epoll_);
    throw_errno("cannot create an event", error);
  }
  fork_guard::add(epoll_);
  fork_guard::add(event_);
  poll(event_, EPOLLIN, false);
  thread_ = std::thread(&Watch::run, this);
}

Watch::~Watch() {
  if (fork_guard::generation() != generation_) {  // a forked child's copy: its thread does not exist
    fork_guard::forget(thread_);
    fork_guard::forget(changed_);
  } else {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
    }
    wake();
    thread_.join();
  }
  for (const auto& [socket, link] : links_) fork_guard::close(socket);
  for (const auto& [pidfd, rank] : processes_) fork_guard::close(pidfd);
  fork_guard::close(event_);
  fork_guard::close(epoll_);
}

void Watch::poll(int fd, std::uint32_t events, bool again) {
  epoll_event event{};
  event.events = events;
  event.data.fd = fd;
  if (::epoll_ctl(epoll_, again ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, fd, &event) != 0) {
    throw_errno("cannot watch descriptor " + std::to_string(fd));
  }
}

void Watch::wake() const {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = ::write(event_, &one, sizeof one);
}

void Watch::add_process(int rank, int pidfd) {
  if (rank < 0 || rank >= world_) throw Error(Code::invalid, name(rank) + " is not in the group");
  fork_guard::add(pidfd);
  const std::lock_guard lock(mutex_);
  processes_[pidfd] = rank;
  poll(pidfd, EPOLLIN, false);
}

void Watch::add_link(int rank, int socket) {
  if (rank < 0 || rank >= world_) throw Error(Code::invalid, name(rank) + " is not in the group");
  prepare(socket);
  fork_guard::add(socket);
  const std::lock_guard lock(mutex_);
  Link& link = *(links_[socket] = std::make_unique<Link>(Link{rank, socket}));
  poll(socket, EPOLLIN | EPOLLRDHUP, false);
  if (failure_)
    send(link, Notice::of(Kind::broken, *failure_));  // the other links got the notice before this link was added
}

void Watch::listen(Listener listener) {
  const std::lock_guard lock(mutex_);
  listener_ = std::move(listener);
  wake();
}

// Reads the other ranks' notices about the rank that an error blames; returns that rank, -1 for none.
int Watch::receive_about_blamed(std::unique_lock<std::mutex>& lock, const Error& error) {
  std::vector<int> sockets;
  for (const auto& [socket, link] : links_) sockets.push_back(socket);
  for (const int socket : sockets) receive(*links_.at(socket));  // these notices are older than this error
  const int blamed = error.rank();
  if (blamed >= 0) {
    // The blamed rank may have ended its connection because of another rank's failure. Then it sent a `broken` notice
    // about this failure before its `left` notice, and both are in flight.
    changed_.wait_for(lock, kVerdict, [&] { return failure_ || left_.contains(blamed) || leaving_; });
  }
  return blamed;
}

Error Watch::verdict(const Error& error) {
  if (generation_ != fork_guard::generation()) return error;
  std::unique_lock lock(mutex_);
  receive_about_blamed(lock, error);
  wake();  // passes the notices read here to the listener
  return failure_.value_or(error);
}

// `late` blames the rank that this rank waited for. That rank may itself wait for another rank, and so on. Returns the
// error that blames the last rank of this chain. Every rank that waits for another rank reports the rank that it waits
// for, within kVerdict. A rank that reports none is frozen, or outside the operation.
Error Watch::culprit_of(std::unique_lock<std::mutex>& lock, const Error& late) {
  Notice notice = Notice::of(Kind::suspect, Error(Code::collective, "", rank_));
  notice.operation = static_cast<std::uint64_t>(late.rank());
  apply(notice, nullptr);
  wake();
  changed_.wait_for(lock, kVerdict, [&] { return failure_ || leaving_; });
  int rank = late.rank();
  std::set<int> seen = {rank_};
  while (suspects_.contains(rank) && seen.insert(rank).second) rank = suspects_.at(rank);
  if (seen.contains(rank)) {  // a cycle: the cause is a rank outside of it
    rank = 0;
    while (rank < world_ && (suspects_.contains(rank) || left_.contains(rank))) ++rank;
    if (rank == world_) rank = late.rank();
  }
  if (rank == late.rank()) return Error(Code::rank_failed, late.what(), rank);
  return Error(
      Code::rank_failed,
      "timed out: " + name(rank) + " did not take part within the timeout: " + name(late.rank()) + " waited for it",
      rank);
}

Error Watch::announce(const Error& found) {
  if (generation_ != fork_guard::generation()) return found;
  std::unique_lock lock(mutex_);
  const Error error = found.code() == Code::late ? culprit_of(lock, found) : found;
  const int blamed = found.code() == Code::late ? error.rank() : receive_about_blamed(lock, error);
  if (!failure_ && !leaving_) {
    const bool has_left = blamed >= 0 && left_.contains(blamed);
    const Error told = has_left ? Error(error.code(), name(blamed) + " left the group", blamed) : error;
    const Notice notice = Notice::of(Kind::broken, told);
    failure_ = notice.error();
    flood(notice, nullptr);
  }
  wake();
  return failure_.value_or(error);
}

void Watch::withdraw(std::uint64_t operation) {
  if (generation_ != fork_guard::generation()) return;
  Notice notice = Notice::of(Kind::withdraw, Error(Code::collective, "", rank_));
  notice.operation = operation;
  const std::lock_guard lock(mutex_);
  apply(notice, nullptr);
  wake();
}

void Watch::leave(double seconds) {
  if (generation_ != fork_guard::generation()) return;
  std::unique_lock lock(mutex_);
  if (!leaving_) {
    leaving_ = true;
    flood(Notice::of(Kind::left, Error(Code::collective, "", rank_)), nullptr);
    for (const auto& [socket, link] : links_) {
      link->left_queued = true;
      flush(*link);
    }
  }
  // If this rank closed a socket with unread bytes, sent bytes that are not delivered yet would be lost. So it waits
  // until the neighbours have closed their ends.
  changed_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return links_.empty(); });
}

void Watch::drop_links() {
  if (generation_ != fork_guard::generation()) return;
  const std::lock_guard lock(mutex_);
  leaving_ = true;
  while (!links_.empty()) close(*links_.begin()->second);
}

std::optional<Error> Watch::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

std::set<int> Watch::failed_ranks() const {
  const std::lock_guard lock(mutex_);
  return failed_;
}

std::set<int> Watch::left_ranks() const {
  const std::lock_guard lock(mutex_);
  return left_;
}

bool Watch::wait(double seconds) const {
  std::unique_lock lock(mutex_);
  const auto over = [this] { return failure_.has_value(); };
  if (seconds >= 0) return changed_.wait_for(lock, std::chrono::duration<double>(seconds), over);
  changed_.wait(lock, over);
  return true;
}

void Watch::run() {
  thread_cpus::enter();
  epoll_event events[16];
  for (;;) {
    const int n = ::epoll_wait(epoll_, events, 16, -1);
    {
      const std::lock_guard lock(mutex_);
      if (closing_) return;
      for (int i = 0; i < n; ++i) {
        const int fd = events[i].data.fd;
        std::uint64_t count;
        if (fd == event_) {
          [[maybe_unused]] const ssize_t got = ::read(event_, &count, sizeof count);
        } else if (processes_.contains(fd)) {
          process_ended(fd);
        } else if (const auto found = links_.find(fd); found != links_.end()) {
          if ((events[i].events & EPOLLOUT) != 0) flush(*found->second);
          receive(*found->second);
        }
      }
    }
    notify_listener();
  }
}

void Watch::notify_listener() {
  std::unique_lock lock(mutex_);
  changed_.notify_all();
  if (listener_.suspected && !suspects_.empty() && !reported_suspicion_) {
    reported_suspicion_ = true;
    lock.unlock();
    listener_.suspected();
    lock.lock();
  }
  if (listener_.withdraw) {
    const auto unreported = std::exchange(unreported_, {});
    lock.unlock();
    for (const std::uint64_t operation : unreported) listener_.withdraw(operation);
    lock.lock();
  }
  if (!failure_ || reported_failure_ || !listener_.failed) return;
  reported_failure_ = true;
  const Error error = *failure_;
  lock.unlock();
  listener_.failed(error);
}

// Reads all available bytes. If the link has ended, its rank is dead, unless it sent `left` before.
void Watch::receive(Link& link) {
  char buffer[4096];
  for (;;) {
    const ssize_t n = ::recv(link.socket, buffer, sizeof buffer, 0);
    if (n > 0) {
      link.in.append(buffer, static_cast<std::size_t>(n));
      continue;
    }
    const int error = n == 0 ? 0 : errno;
    if (error == EINTR) continue;
    parse(link);
    if (error == EAGAIN) return;
    const int rank = link.rank;
    close(link);
    if (!left_.contains(rank)) {
      fail(rank, n == 0 ? " died: its control connection ended"
                        : std::string(" is lost: its control connection broke (") + std::strerror(error) + ")");
    }
    return;
  }
}

void Watch::process_ended(int pidfd) {
  const int rank = processes_[pidfd];
  processes_.erase(pidfd);
  fork_guard::close(pidfd);
  // If the rank sent a `left` notice, the link has it already, because the rank sent it before its process ended.
  std::vector<int> sockets;
  for (const auto& [socket, link] : links_) {
    if (link->rank == rank) sockets.push_back(socket);
  }
  for (const int socket : sockets) receive(*links_.at(socket));
  if (!left_.contains(rank)) fail(rank, " died: its process ended");
}

void Watch::parse(Link& link) {
  std::size_t at = 0;
  bool sound = true;
  while (sound && link.in.size() - at >= offsetof(Notice, text)) {
    Notice notice;
    std::memcpy(static_cast<void*>(&notice), link.in.data() + at, offsetof(Notice, text));
    sound = notice.magic == kMagic && notice.bytes <= kTextBytes;
    if (!sound || link.in.size() - at < notice.size()) break;
    std::memcpy(notice.text, link.in.data() + at + offsetof(Notice, text), notice.bytes);
    at += notice.size();
    sound = apply(notice, &link);
  }
  link.in.erase(0, sound ? at : link.in.size());
  if (!sound) fail(link.rank, " sent a malformed notice");
}

bool Watch::apply(const Notice& notice, const Link* source) {
  if (notice.rank < -1 || notice.rank >= world_ || notice.code_of() > kLastCode) return false;
  switch (notice.kind) {
    case Kind::failed:
      if (notice.rank < 0) return false;
      if (!failed_.insert(notice.rank).second) return true;
      break;
    case Kind::broken:
      if (failure_) return true;
      break;
    case Kind::left:
      if (notice.rank < 0) return false;
      if (notice.rank == rank_ || !left_.insert(notice.rank).second) return true;
      break;
    case Kind::suspect:
      if (notice.rank < 0 || notice.operation >= static_cast<std::uint64_t>(world_)) return false;
      if (!suspects_.emplace(notice.rank, static_cast<int>(notice.operation)).second) return true;
      break;
    case Kind::withdraw:
      if (!withdrawn_.insert(notice.operation).second) return true;
      if (withdrawn_.size() > kWithdrawals) withdrawn_.erase(withdrawn_.begin());
      unreported_.push_back(notice.operation);
      break;
    default: return false;
  }
  if (leaving_) return true;
  const bool fatal = notice.kind == Kind::failed || notice.kind == Kind::broken;
  if (fatal && !failure_) failure_ = notice.error();
  flood(notice, source);
  return true;
}

void Watch::fail(int rank, const std::string& why) {
  if (leaving_) return;
  apply(Notice::of(Kind::failed, Error(Code::rank_failed, name(rank) + why, rank)), nullptr);
}

void Watch::flood(const Notice& notice, const Link* source) {
  for (const auto& [socket, link] : links_) {
    if (link.get() != source) send(*link, notice);
  }
}

void Watch::send(Link& link, const Notice& notice) {
  link.out.append(reinterpret_cast<const char*>(&notice), notice.size());
  flush(link);
}

// Never closes the link: a later read reports the error.
void Watch::flush(Link& link) {
  while (!link.out.empty()) {
    const ssize_t n = ::send(link.socket, link.out.data(), link.out.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno != EAGAIN) link.out.clear();
    if (n < 0) break;
    link.out.erase(0, static_cast<std::size_t>(n));
  }
  poll(link.socket, EPOLLIN | EPOLLRDHUP | (link.out.empty() ? 0u : EPOLLOUT), true);
  if (link.out.empty() && link.left_queued) ::shutdown(link.socket, SHUT_WR);
}

void Watch::close(Link& link) {
  const int socket = link.socket;
  links_.erase(socket);
  fork_guard::close(socket);
  changed_.notify_all();
}

}  // namespace ff::hfreduce
