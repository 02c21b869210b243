#include "hfreduce/post.hpp"

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

#include "base/fork_guard.hpp"
#include "base/thread_cpus.hpp"

namespace ff::hfreduce {
namespace {

constexpr std::uint64_t kKick = UINT64_MAX;  // token of kick_fd_
// How long our thread leaves polling to visitors: one that waited comes back soon, and waking costs
// it a core.
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
  return Clock::now() +
         std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

int milliseconds_until(Clock::time_point time) {
  if (time == Clock::time_point::max()) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(time - Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, INT_MAX));
}

}  // namespace

// The courier, locked; at the end the operations that ended meanwhile are completed, after the lock
// is gone.
class Post::Session {
 public:
  Session(Post& post, std::unique_lock<std::mutex> lock, bool poller)
      : post_(post), lock_(std::move(lock)), poller_(poller) {
    nearest_ = courier().ledger().nearest();
  }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  ~Session() {
    const auto ends = courier().ledger().take_ends();
    const Clock::time_point nearest = courier().ledger().nearest();
    const bool sooner = nearest < nearest_;
    const bool busy = courier().busy();
    post_.nearest_ = nearest;
    post_.busy_ = busy;
    post_.pending_ = courier().ledger().size();
    lock_.unlock();
    std::map<int, Error> verdicts;  // by the rank that is blamed: one is enough, it takes time
    for (const auto& end : ends) {
      std::optional<Error> error = end.error;
      if (post_.judge_ && error && error->rank() >= 0) {
        const int blamed = error->rank();
        if (!verdicts.contains(blamed)) verdicts.emplace(blamed, post_.judge_(*error));
        if (verdicts.at(blamed).code() != error->code() || verdicts.at(blamed).rank() != blamed) {
          error = verdicts.at(blamed);  // that of the group
        }
      }
      end.operation->complete(std::move(error));
    }
    // The poller may sleep past a new deadline or copy; a visitor may be waiting for what ended.
    if (!poller_ && (sooner || busy || (!ends.empty() && post_.visited_))) post_.kick();
  }

  mail::Courier& courier() { return post_.courier_; }

 private:
  Post& post_;
  std::unique_lock<std::mutex> lock_;
  const bool poller_;
  Clock::time_point nearest_;
};

template <class Act>
void Post::with_courier(bool poller, const Act& act) {
  const struct Rest {
    Post& post;
    bool poller;
    ~Rest() { post.post_all(poller); }
  } rest{*this, poller};
  act(Session(*this, std::unique_lock(mutex_), poller).courier());
}

Post::Post(int rank, int world)
    : rank_(rank),
      world_(world),
      generation_(fork_guard::generation()),
      kick_fd_(new_eventfd()),
      courier_(rank, world) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kKick;
  ::epoll_ctl(courier_.poll_fd(), EPOLL_CTL_ADD, kick_fd_, &event);
}

Post::~Post() {
  if (fork_guard::generation() != generation_) {  // what waits and runs belongs to the parent
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
  with_courier(true, [](mail::Courier& courier) {
    courier.leave(Error(Code::collective, "the group was destroyed"));
  });
  fork_guard::close(kick_fd_);
}

void Post::add_outgoing(int rank, int fd, bool local) {
  start();
  with_courier(false, [=](mail::Courier& courier) { courier.add_outgoing(rank, fd, local); });
  rouse();
}

void Post::add_incoming(int rank, int fd) {
  start();
  with_courier(false, [=](mail::Courier& courier) { courier.add_incoming(rank, fd); });
  rouse();
}

bool Post::heard_from(int rank) {
  const std::lock_guard lock(mutex_);
  return courier_.heard_from(rank);
}

void Post::fail(const Error& error) {
  with_courier(false, [&](mail::Courier& courier) { courier.fail(error); });
}

std::shared_ptr<Operation> Post::send(int to, std::uint64_t tag, const void* data,
                                      std::size_t bytes, double seconds, bool attended) {
  return submit(true, to, tag, static_cast<char*>(const_cast<void*>(data)), bytes, seconds,
                attended);
}

std::shared_ptr<Operation> Post::receive(int from, std::uint64_t tag, void* data,
                                         std::size_t bytes, double seconds, bool attended) {
  return submit(false, from, tag, static_cast<char*>(data), bytes, seconds, attended);
}

std::shared_ptr<Operation> Post::submit(bool sending, int peer, std::uint64_t tag, char* data,
                                        std::size_t bytes, double seconds, bool attended) {
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
    throw Error(Code::invalid, to_string(*message) + " is not possible for rank " +
                                   std::to_string(rank_) + " of " + std::to_string(world_));
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

// Whoever holds the courier posts what lies in the box when it is done: nobody waits for it here.
void Post::post_all(bool poller) {
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
    for (const auto& message : posted) session.courier().admit(message);
  }
}

bool Post::wait(Operation& operation, double seconds) {
  const auto until = seconds < 0 ? Clock::time_point::max() : after(seconds);
  if (operation.done()) return true;
  if (!visit()) return operation.wait(seconds);
  while (!operation.done() && Clock::now() < until) turn(until);
  leave();
  return operation.done();
}

// Waits until a link is ready, a deadline or `until` passes, or somebody kicks; then moves what can
// be moved.
void Post::turn(Clock::time_point until) {
  constexpr int kEvents = 16;
  epoll_event events[kEvents];
  const Clock::time_point nearest = nearest_;
  const int timeout = busy_ ? 0 : milliseconds_until(std::min(until, nearest));
  const int n = ::epoll_wait(courier_.poll_fd(), events, kEvents, timeout);
  for (int i = 0; i < n; ++i) {
    if (events[i].data.u64 == kKick) {
      std::uint64_t count;
      [[maybe_unused]] const ssize_t got = ::read(kick_fd_, &count, sizeof count);
    } else {
      with_courier(true, [event = events[i]](mail::Courier& courier) {
        courier.ready(event.data.u64, event.events);
      });
    }
  }
  if (busy_) with_courier(true, [](mail::Courier& courier) { courier.copy(); });
  if (Clock::now() >= nearest) {
    with_courier(true, [](mail::Courier& courier) { courier.expire(Clock::now()); });
  }
}

void Post::kick() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t put = ::write(kick_fd_, &one, sizeof one);
}

// Makes the calling thread the poller, unless another visitor is: that one serves all.
bool Post::visit() {
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

void Post::leave() {
  const std::lock_guard role(role_mutex_);
  visitor_ = false;
  visited_ = false;
  if (pending_ > 0) needed_ = true;
  if (needed_ || sleeping_) role_changed_.notify_all();
}

void Post::rouse() {
  const std::lock_guard role(role_mutex_);
  if (polling_ || visitor_) return;
  needed_ = true;
  role_changed_.notify_all();
}

void Post::start() {
  const std::lock_guard role(role_mutex_);
  if (!thread_.joinable()) thread_ = std::thread(&Post::work, this);
}

// Gives up polling until it is our thread's turn again; false: the object ends.
bool Post::take_over() {
  std::unique_lock role(role_mutex_);
  polling_ = false;
  role_changed_.notify_all();
  std::uint64_t seen = visits_ - (visitor_ ? 1 : 0);
  while (!closing_ && (visitor_ || (visits_ != seen && !needed_))) {
    sleeping_ = visitor_ && visits_ == seen;  // a long visit: its end is worth a wake-up
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

void Post::work() {
  thread_cpus::enter();
  while (take_over()) turn(Clock::time_point::max());
}

}  // namespace ff::hfreduce
