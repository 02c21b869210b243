#include "fs3/io/service/service.hpp"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "base/error.hpp"
#include "base/process/worker_pool.hpp"
#include "fs3/io/client/local_files.hpp"
#include "fs3/io/target/peers.hpp"

namespace ff::fs3::io {
namespace {

constexpr std::uint64_t kJobs = 0;  // epoll data of `jobs_ready_`; connection ids start at 1

// Maximum number of waiting bytes that the thread that made an answer sends on its own. The thread leaves more bytes to
// a worker, because the thread may hold a target's lock.
constexpr std::size_t kMostOwnBytes = std::size_t{64} << 10;

int made(int fd, const char* what) {
  if (fd < 0) throw_errno(what);
  return fd;
}

}  // namespace

Service::Service(ServiceOptions options)
    : epoll_(made(::epoll_create1(EPOLL_CLOEXEC), "epoll")),
      jobs_ready_(made(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK | EFD_SEMAPHORE), "an eventfd")),
      nowhere_(made(::open("/dev/null", O_WRONLY | O_CLOEXEC), "/dev/null")),
      buffers_(options.buffers),
      pools_{Pool(options.buffers / 2), Pool(options.buffers / 4), Pool(options.buffers / 8),
             Pool(options.buffers / 8)},
      peers_(std::make_shared<Peers>(*this)) {
  epoll_event event{EPOLLIN, {.u64 = kJobs}};
  if (::epoll_ctl(epoll_, EPOLL_CTL_ADD, jobs_ready_, &event) != 0) throw_errno("cannot add a descriptor to epoll");
  const unsigned workers = options.workers != 0 ? options.workers : std::min(32u, worker_pool::cores() + 4);
  for (unsigned n = 0; n < workers; ++n) workers_.emplace_back([this] { work(); });
}

Service::~Service() {
  stop();
  ::close(epoll_);
  ::close(jobs_ready_);
  ::close(nowhere_);
}

void Service::stop() {
  if (stopping_.exchange(true)) return;
  std::vector<std::shared_ptr<Target>> targets;
  {
    std::shared_lock lock(mutex_);
    for (const auto& [id, target] : by_id_) targets.push_back(target);
  }
  for (const auto& target : targets) target->stop();
  peers_->stop();
  const std::uint64_t all = workers_.size();
  if (::write(jobs_ready_, &all, sizeof all) < 0) throw_errno("cannot write to an eventfd");
  for (auto& worker : workers_) worker.join();
  std::unordered_map<std::uint64_t, Shared> connections;
  {
    std::unique_lock lock(mutex_);
    connections.swap(connections_);
    by_chain_.clear();
    by_id_.clear();
  }
  for (const auto& [id, connection] : connections) connection->line.shut();  // other threads may still have a reference
  std::lock_guard lock(jobs_mutex_);
  jobs_.clear();
  fetches_.clear();
}

void Service::add(std::shared_ptr<Target> target) {
  target->start();
  std::unique_lock lock(mutex_);
  by_chain_[target->chain()].push_back(target);
  by_id_[target->id()] = std::move(target);
}

std::shared_ptr<Target> Service::remove(TargetId id) {
  std::shared_ptr<Target> target;
  {
    std::unique_lock lock(mutex_);
    const auto found = by_id_.find(id);
    if (found == by_id_.end()) return nullptr;
    target = found->second;
    by_id_.erase(found);
    auto& others = by_chain_[target->chain()];
    std::erase(others, target);
    if (others.empty()) by_chain_.erase(target->chain());
  }
  target->stop();
  for (const Shared& connection : all()) {
    if (connection->sharing) connection->sharing->forget(*target);
    connection->holding.forget(*target);
  }
  // The target's store can be reopened only when no thread reads through it. Clients that receive their answers slowly
  // must retry.
  for (const Shared& connection : all()) connection->line.drop_holders();
  return target;
}

std::shared_ptr<MessageSender> Service::sender() { return peers_; }

void Service::serve(int fd) {
  const Shared connection = attach(fd);
  std::lock_guard lock(connection->mutex);
  arm(*connection, true);
}

void Service::locate(TargetId target, std::uint32_t node) { peers_->locate(target, node); }

void Service::connected(std::uint32_t node, int fd) {
  const Shared connection = attach(fd);
  peers_->connected(node, connection);
  std::lock_guard lock(connection->mutex);
  arm(*connection, true);
}

std::vector<std::uint32_t> Service::wanted() const { return peers_->wanted(); }

ServiceStatistics Service::statistics() const {
  ServiceStatistics now;
  {
    std::shared_lock lock(mutex_);
    now.connections = connections_.size();
  }
  now.reads = reads_;
  now.writes = writes_;
  now.messages = messages_;
  now.read_bytes = read_bytes_;
  now.written_bytes = written_bytes_;
  now.refused = refused_;
  now.local_bytes = local_bytes_;
  for (const Shared& connection : all()) {
    if (connection->sharing) now.held += connection->sharing->held();
    now.ready += connection->holding.held();
  }
  now.mismatched = mismatched_;
  now.reported = reported_;
  now.reading = reading_.read();
  now.writing = writing_.read();
  now.buffer_limit = buffers_;
  for (const auto& pool : pools_) now.buffer_bytes += pool.out();
  std::lock_guard lock(jobs_mutex_);
  now.jobs = jobs_.size() + fetches_.size();
  return now;
}

// ---- Connections and workers -------------------------------------------------------------------------------------

Service::Shared Service::attach(int fd) {
  auto connection = std::make_shared<Connection>(fd, [this](const Head& head) -> Pool& { return pool_for(head); });
  if (LocalFiles::possible(fd)) connection->sharing.emplace(connection->line);
  {
    std::unique_lock lock(mutex_);
    connection->id = next_id_++;
    connections_.emplace(connection->id, connection);
  }
  epoll_event event{EPOLLONESHOT, {.u64 = connection->id}};
  if (::epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) != 0) throw_errno("cannot add a descriptor to epoll");
  return connection;
}

void Service::drop(const Shared& connection) {
  {
    std::lock_guard lock(connection->mutex);
    if (std::exchange(connection->gone, true)) return;
    ::epoll_ctl(epoll_, EPOLL_CTL_DEL, connection->line.fd(), nullptr);
  }
  connection->line.shut();
  {
    std::unique_lock lock(mutex_);
    connections_.erase(connection->id);
  }
  if (connection->sharing) connection->sharing->clear();
  connection->holding.clear();
  peers_->broken(*connection);
}

std::vector<Service::Shared> Service::all() const {
  std::vector<Shared> found;
  const std::shared_lock lock(mutex_);
  found.reserve(connections_.size());
  for (const auto& [id, connection] : connections_) found.push_back(connection);
  return found;
}

void Service::release_old() {
  const auto now = SharedFiles::Clock::now();
  for (const Shared& connection : all()) {
    if (connection->sharing) connection->sharing->expire(now);
    connection->holding.expire(now);
  }
}

Service::Shared Service::find(std::uint64_t id) const {
  std::shared_lock lock(mutex_);
  const auto found = connections_.find(id);
  return found == connections_.end() ? nullptr : found->second;
}

void Service::work() {
  while (!stopping_) {
    epoll_event event;
    const int count = ::epoll_wait(epoll_, &event, 1, -1);
    if (count <= 0) continue;  // EINTR
    if (event.data.u64 == kJobs) {
      run_job();
    } else if (const Shared connection = find(event.data.u64)) {
      {
        std::lock_guard lock(connection->mutex);
        connection->owned = true;
      }
      serve(connection);
    }
  }
}

// Called by the worker that owns the connection.
void Service::serve(const Shared& connection) {
  FrameConnection& line = connection->line;
  Frame frame;
  line.flush();
  while (line.waiting() < FrameConnection::kMostWaiting) {
    const FrameConnection::Got got = line.receive(frame);
    if (got == FrameConnection::Got::broken) return drop(connection);
    if (got == FrameConnection::Got::starved) {
      release(connection, false);
      line.starved_pool().when_free([this, id = connection->id] {
        if (const Shared fed = find(id)) {
          std::lock_guard lock(fed->mutex);
          if (!fed->owned) arm(*fed, true);
        }
      });
      return;
    }
    if (got == FrameConnection::Got::nothing) break;
    if (!handle(connection, frame)) {
      ++refused_;
      return drop(connection);
    }
    line.flush();
  }
  release(connection, true);
}

void Service::release(const Shared& connection, bool hungry) {
  std::lock_guard lock(connection->mutex);
  connection->line.flush();  // sends what other threads queued meanwhile
  connection->owned = false;
  arm(*connection, hungry);
}

void Service::arm(Connection& connection, bool hungry) {
  if (connection.gone) return;
  const std::size_t waiting = connection.line.waiting();
  epoll_event event{EPOLLONESHOT | EPOLLRDHUP, {.u64 = connection.id}};
  if (hungry && waiting < FrameConnection::kMostWaiting) event.events |= EPOLLIN;
  if (waiting != 0) event.events |= EPOLLOUT;
  ::epoll_ctl(epoll_, EPOLL_CTL_MOD, connection.line.fd(), &event);
}

void Service::answer(const Shared& connection, Outgoing outgoing) {
  connection->line.send(std::move(outgoing));
  push(connection);
}

void Service::push(const Shared& connection) {
  std::lock_guard lock(connection->mutex);
  if (connection->owned || connection->gone) return;
  const bool much = connection->line.waiting() > kMostOwnBytes;
  if (much || !connection->line.flush() || connection->line.broken()) arm(*connection, true);
}

void Service::later(std::function<void()> job) {
  {
    std::lock_guard lock(jobs_mutex_);
    jobs_.push_back(std::move(job));
  }
  const std::uint64_t one = 1;
  if (::write(jobs_ready_, &one, sizeof one) < 0 && errno != EAGAIN) throw_errno("cannot write to an eventfd");
}

void Service::run_job() {
  std::uint64_t one;
  if (::read(jobs_ready_, &one, sizeof one) < 0) return;  // another worker was faster
  std::function<void()> job;
  {
    std::lock_guard lock(jobs_mutex_);
    if (jobs_.empty()) return;
    job = std::move(jobs_.front());
    jobs_.pop_front();
  }
  job();
}

Service::Targets Service::of_chain(std::uint32_t chain) const {
  std::shared_lock lock(mutex_);
  const auto found = by_chain_.find(chain);
  return found == by_chain_.end() ? Targets{} : found->second;
}

std::shared_ptr<Target> Service::head_of(std::uint32_t chain) const {
  const auto is_head = [](const auto& target) { return target->role() == Target::Role::head; };
  std::shared_lock lock(mutex_);
  const auto found = by_chain_.find(chain);
  if (found == by_chain_.end()) return nullptr;
  const auto head = std::find_if(found->second.begin(), found->second.end(), is_head);
  return head == found->second.end() ? found->second.front() : *head;
}

// Returns a serving target of the chain; successive calls take turns if there are several.
std::shared_ptr<Target> Service::serving(std::uint32_t chain) {
  std::shared_lock lock(mutex_);
  const auto found = by_chain_.find(chain);
  if (found == by_chain_.end()) return nullptr;
  const Targets& targets = found->second;
  const std::size_t first = targets.size() > 1 ? turn_++ : 0;
  for (std::size_t n = 0; n < targets.size(); ++n) {
    const auto& target = targets[(first + n) % targets.size()];
    if (target->role() != Target::Role::none) return target;
  }
  return targets.front();
}

std::shared_ptr<Target> Service::of_id(TargetId id) const {
  std::shared_lock lock(mutex_);
  const auto found = by_id_.find(id);
  return found == by_id_.end() ? nullptr : found->second;
}

Pool& Service::pool_for(const Head& head) {
  const std::size_t hop = head.kind == FrameKind::message ? std::clamp<std::size_t>(head.flags, 1, kHops - 1) : 0;
  return pools_[hop];
}

}  // namespace ff::fs3::io
