#include "hfreduce/p2p/p2p_engine.hpp"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <iterator>
#include <map>
#include <optional>
#include <utility>

#include "base/process/fork_guard.hpp"
#include "base/process/thread_cpus.hpp"

namespace ff::hfreduce {
namespace {

constexpr std::uint64_t kKick = UINT64_MAX;  // token of kick_fd_
// Time after a visit (of a thread in wait()) for which the engine's own thread does not poll. The visitor soon waits
// again, and a wake-up of the engine's own thread would take a core from the visitor.
constexpr auto kGrace = std::chrono::milliseconds(1);

int new_eventfd() {
  const int fd = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (fd < 0) throw_errno("cannot create an event descriptor");
  fork_guard::add(fd);
  return fd;
}

Clock::time_point after(double seconds) {
  constexpr double kForever = 1e9;
  if (seconds >= kForever) return Clock::time_point::max();
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

int milliseconds_until(Clock::time_point time) {
  if (time == Clock::time_point::max()) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(time - Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, INT_MAX));
}

}  // namespace

// Locked access to the links. Its destructor unlocks and then completes the operations that ended meanwhile.
class P2PEngine::Session {
 public:
  Session(P2PEngine& post, std::unique_lock<std::mutex> lock, bool poller)
      : post_(post), lock_(std::move(lock)), poller_(poller) {
    nearest_ = links().ledger().nearest();
  }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  ~Session() {
    const auto ends = links().ledger().take_ends();
    const Clock::time_point nearest = links().ledger().nearest();
    const bool sooner = nearest < nearest_;
    const bool busy = links().busy();
    post_.nearest_ = nearest;
    post_.busy_ = busy;
    post_.pending_ = links().ledger().size();
    lock_.unlock();
    std::map<int, Error> verdicts;  // by blamed rank; asked once for each rank, because an answer takes time
    for (const auto& end : ends) {
      std::optional<Error> error = end.error;
      if (post_.judge_ && error && error->rank() >= 0) {
        const int blamed = error->rank();
        if (!verdicts.contains(blamed)) verdicts.emplace(blamed, post_.judge_(*error));
        if (verdicts.at(blamed).code() != error->code() || verdicts.at(blamed).rank() != blamed) {
          error = verdicts.at(blamed);  // the group's error
        }
      }
      end.operation->complete(std::move(error));
    }
    // The poller may sleep past a new deadline or copy; a visitor may be waiting for an operation that ended.
    if (!poller_ && (sooner || busy || (!ends.empty() && post_.visited_))) post_.kick();
  }

  mail::LinkManager& links() { return post_.links_; }

 private:
  P2PEngine& post_;
  std::unique_lock<std::mutex> lock_;
  const bool poller_;
  Clock::time_point nearest_;
};

template <class Act>
void P2PEngine::with_links(bool poller, const Act& act) {
  const struct Rest {
    P2PEngine& post;
    bool poller;
    ~Rest() { post.post_all(poller); }
  } rest{*this, poller};
  act(Session(*this, std::unique_lock(mutex_), poller).links());
}

P2PEngine::P2PEngine(int rank, int world)
    : rank_(rank), world_(world), generation_(fork_guard::generation()), kick_fd_(new_eventfd()), links_(rank, world) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kKick;
  ::epoll_ctl(links_.poll_fd(), EPOLL_CTL_ADD, kick_fd_, &event);
}

P2PEngine::~P2PEngine() {
  if (fork_guard::generation() != generation_) {  // queued and running operations belong to the parent
    fork_guard::forget(thread_);
    fork_guard::forget(role_changed_);
    return;
  }
  {
    const std::lock_guard role(role_mutex_);
    closing_ = true;
    role_changed_.notify_all();
  }
  kick();
  if (thread_.joinable()) thread_.join();
  with_links(true, [](mail::LinkManager& links) { links.leave(Error(Code::collective, "the group was destroyed")); });
  fork_guard::close(kick_fd_);
}

void P2PEngine::add_outgoing(int rank, int fd, bool local) {
  start();
  with_links(false, [=](mail::LinkManager& links) { links.add_outgoing(rank, fd, local); });
  rouse();
}

void P2PEngine::add_incoming(int rank, int fd) {
  start();
  with_links(false, [=](mail::LinkManager& links) { links.add_incoming(rank, fd); });
  rouse();
}

bool P2PEngine::heard_from(int rank) {
  const std::lock_guard lock(mutex_);
  return links_.heard_from(rank);
}

void P2PEngine::fail(const Error& error) {
  with_links(false, [&](mail::LinkManager& links) { links.fail(error); });
}

std::shared_ptr<Operation> P2PEngine::send(int to, std::uint64_t tag, const void* data, std::size_t bytes,
                                           double seconds, bool attended) {
  return submit(true, to, tag, static_cast<char*>(const_cast<void*>(data)), bytes, seconds, attended);
}

std::shared_ptr<Operation> P2PEngine::receive(int from, std::uint64_t tag, void* data, std::size_t bytes,
                                              double seconds, bool attended) {
  return submit(false, from, tag, static_cast<char*>(data), bytes, seconds, attended);
}

std::shared_ptr<Operation> P2PEngine::submit(bool sending, int peer, std::uint64_t tag, char* data, std::size_t bytes,
                                             double seconds, bool attended) {
  const auto message = std::make_shared<mail::Message>();
  message->sending = sending;
  message->peer = peer;
  message->tag = tag;
  message->data = data;
  message->bytes = bytes;
  message->seconds = seconds;
  if (seconds > 0) message->deadline = after(seconds);
  const auto operation = message->operation = std::make_shared<Operation>();
  if (peer < (sending ? 0 : -1) || peer >= world_ || peer == rank_) {
    throw Error(Code::invalid, to_string(*message) + " is not possible for rank " + std::to_string(rank_) + " of " +
                                   std::to_string(world_));
  }
  start();
  {
    const std::lock_guard box(box_mutex_);
    box_.push_back(message);
  }
  post_all(false);
  if (!attended && pending_ > 0) rouse();
  return operation;
}

// Admits the posted messages in box_. Never waits for mutex_: the thread that holds it calls this function after it
// unlocks, and so admits the messages.
void P2PEngine::post_all(bool poller) {
  for (;;) {
    {
      const std::lock_guard box(box_mutex_);
      if (box_.empty()) return;
    }
    std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return;
    Session session(*this, std::move(lock), poller);
    std::vector<mail::MessagePtr> posted;
    {
      const std::lock_guard box(box_mutex_);
      posted.swap(box_);
    }
    for (const auto& message : posted) session.links().admit(message);
  }
}

bool P2PEngine::wait(Operation& operation, double seconds) {
  const auto until = seconds < 0 ? Clock::time_point::max() : after(seconds);
  if (operation.done()) return true;
  if (!visit()) return operation.wait(seconds);
  while (!operation.done() && Clock::now() < until) turn(until);
  leave();
  return operation.done();
}

// Waits until a link is ready, a deadline or `until` passes, or kick() is called; then moves as many bytes as possible.
void P2PEngine::turn(Clock::time_point until) {
  constexpr int kEvents = 16;
  epoll_event events[kEvents];
  const Clock::time_point nearest = nearest_;
  const int timeout = busy_ ? 0 : milliseconds_until(std::min(until, nearest));
  const int n = ::epoll_wait(links_.poll_fd(), events, kEvents, timeout);
  for (int i = 0; i < n; ++i) {
    if (events[i].data.u64 == kKick) {
      std::uint64_t count;
      [[maybe_unused]] const ssize_t got = ::read(kick_fd_, &count, sizeof count);
    } else {
      with_links(true, [event = events[i]](mail::LinkManager& links) { links.ready(event.data.u64, event.events); });
    }
  }
  if (busy_) with_links(true, [](mail::LinkManager& links) { links.copy(); });
  if (Clock::now() >= nearest) {
    with_links(true, [](mail::LinkManager& links) { links.expire(Clock::now()); });
  }
}

void P2PEngine::kick() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t put = ::write(kick_fd_, &one, sizeof one);
}

// Makes the calling thread the poller. Returns false if another visitor is the poller: that thread serves all.
bool P2PEngine::visit() {
  std::unique_lock role(role_mutex_);
  if (visitor_) return false;
  visitor_ = true;
  visited_ = true;
  ++visits_;
  if (polling_) {
    kick();
    role_changed_.wait(role, [this] { return !polling_; });
  }
  return true;
}

void P2PEngine::leave() {
  const std::lock_guard role(role_mutex_);
  visitor_ = false;
  visited_ = false;
  if (pending_ > 0) needed_ = true;
  if (needed_ || sleeping_) role_changed_.notify_all();
}

void P2PEngine::rouse() {
  const std::lock_guard role(role_mutex_);
  if (polling_ || visitor_) return;
  needed_ = true;
  role_changed_.notify_all();
}

void P2PEngine::start() {
  const std::lock_guard role(role_mutex_);
  if (!thread_.joinable()) thread_ = std::thread(&P2PEngine::work, this);
}

// Called by the engine's own thread: waits until this thread must poll. Returns false if the engine is being destroyed.
bool P2PEngine::take_over() {
  std::unique_lock role(role_mutex_);
  polling_ = false;
  role_changed_.notify_all();
  std::uint64_t seen = visits_ - (visitor_ ? 1 : 0);
  while (!closing_ && (visitor_ || (visits_ != seen && !needed_))) {
    sleeping_ = visitor_ && visits_ == seen;  // a long visit: leave() wakes this thread at its end
    seen = visits_;
    if (sleeping_) {
      role_changed_.wait(role);
    } else {
      role_changed_.wait_for(role, kGrace);
    }
    sleeping_ = false;
  }
  needed_ = false;
  polling_ = !closing_;
  return polling_;
}

void P2PEngine::work() {
  thread_cpus::enter();
  while (take_over()) turn(Clock::time_point::max());
}

}  // namespace ff::hfreduce
