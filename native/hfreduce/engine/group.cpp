#include "hfreduce/engine/group.hpp"

#include <algorithm>

#include "base/process/fork_guard.hpp"
#include "base/process/thread_cpus.hpp"
#include "hfreduce/device/stager.hpp"
#include "hfreduce/host/host.hpp"
#include "hfreduce/transport/tcp.hpp"
#include "hfreduce/transport/ucx.hpp"

namespace ff::hfreduce {
namespace {

// Rank 0's message to the other ranks: the number of the next operation, and whether that operation is withdrawn.
std::uint64_t verdict(std::uint64_t number, bool withdrawn) { return number << 1 | (withdrawn ? 1 : 0); }

}  // namespace

Group::Group(Config config, std::unique_ptr<Team> team)
    : config_(std::move(config)),
      generation_(fork_guard::generation()),
      timeout_s_(config_.timeout_s),
      team_(std::move(team)) {
  if (config_.layout.hosts.size() > 1) {
    if (config_.transport == TransportKind::ucx) {
      transport_ = std::make_unique<UcxTransport>();
    } else {
      transport_ = std::make_unique<TcpTransport>();
    }
    hierarchy_ = std::make_unique<Hierarchy>(config_.layout, team_.get(), *transport_);
  }
}

Group::~Group() {
  if (fork_guard::generation() != generation_) {  // queued and running operations belong to the parent
    fork_guard::forget(thread_);
    fork_guard::forget(changed_);
    fork_guard::forget(queue_);
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
    changed_.notify_all();
    if (running_ || !queue_.empty()) {
      break_with(Error(Code::collective, "the group was destroyed"));
    }
  }
  if (thread_.joinable()) thread_.join();
}

std::shared_ptr<Operation> Group::submit(Request request, bool run_here) {
  if (fork_guard::generation() != generation_) {
    throw Error(Code::collective, "a forked child is not a member of its parent's groups");
  }
  auto operation = std::make_shared<Operation>(std::move(request));
  {
    const std::lock_guard lock(mutex_);
    operation->number = recorder_.submitted(operation->request.call);
    const bool here = run_here && operation->request.priority == 0;
    if (!here || running_ || !queue_.empty()) {
      queue_.push_back(operation);
      if (!thread_.joinable()) thread_ = std::thread(&Group::work, this);
      changed_.notify_all();
      return operation;
    }
    running_ = true;
  }
  run(*operation);
  const std::lock_guard lock(mutex_);
  running_ = false;
  changed_.notify_all();
  return operation;
}

void Group::work() {
  thread_cpus::enter();
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return (closing_ || !queue_.empty()) && !running_; });
    if (queue_.empty()) return;
    running_ = true;
    const auto operation = next(lock);
    lock.unlock();
    run(*operation);
    lock.lock();
    running_ = false;
    changed_.notify_all();
  }
}

// Removes the next operation from the queue. REQUIRES: the queue is not empty.
std::shared_ptr<Operation> Group::next(std::unique_lock<std::mutex>& lock) {
  auto turn = queue_.begin();
  if ((*turn)->request.priority != 0 && !broken_) {
    const std::uint64_t chosen = choose_next();
    lock.unlock();
    const std::uint64_t settled = settle_next(chosen), number = settled >> 1;
    lock.lock();
    withdrawals_.erase(number);
    const auto is_next = [&](const auto& o) { return o->number == number; };
    changed_.wait(lock, [&] {  // other ranks may have submitted the operation before this rank
      turn = std::find_if(queue_.begin(), queue_.end(), is_next);
      return turn != queue_.end() || closing_ || broken_;
    });
    if (turn == queue_.end()) turn = queue_.begin();  // that operation will end with the error of the group
    (*turn)->withdrawn = settled == verdict(number, true);
  }
  const auto operation = *turn;
  queue_.erase(turn);
  return operation;
}

// Returns this rank's choice of the next operation, as a verdict(). REQUIRES: mutex_ held, and the front of the queue
// has a priority.
std::uint64_t Group::choose_next() const {
  const auto fence = std::find_if(queue_.begin(), queue_.end(), [](const auto& o) { return o->request.priority == 0; });
  const auto withdrawn =
      std::find_if(queue_.begin(), fence, [this](const auto& o) { return withdrawals_.contains(o->number); });
  if (withdrawn != fence) return verdict((*withdrawn)->number, true);
  const auto highest = std::max_element(
      queue_.begin(), fence, [](const auto& a, const auto& b) { return a->request.priority < b->request.priority; });
  return verdict((*highest)->number, false);
}

void Group::withdraw(std::uint64_t number) {
  if (config_.rank != 0) return;
  const std::lock_guard lock(mutex_);
  const auto waits = [&](const auto& o) { return o->number == number && o->request.priority != 0; };
  const bool to_come = number >= recorder_.submitted_so_far();
  if (to_come || std::any_of(queue_.begin(), queue_.end(), waits)) withdrawals_.insert(number);
}

std::set<std::uint64_t> Group::withdrawals() {
  const std::lock_guard lock(mutex_);
  return withdrawals_;
}

std::uint64_t Group::settle_next(std::uint64_t chosen) {
  try {
    if (hierarchy_) return hierarchy_->settle_next(chosen, deadline());
    if (!team_) return chosen;
    if (team_->me() != 0) return team_->await_next(deadline());
    team_->publish_next(chosen);
  } catch (const Error& caught) {
    fail(cause_of(caught));
  }
  return chosen;
}

Deadline Group::deadline(double seconds) const {
  const auto limit = std::chrono::duration<double>(seconds > 0 ? seconds : timeout_s_.load());
  return {Clock::now() + std::chrono::duration_cast<Clock::duration>(limit), &hurried_};
}

void Group::run(Operation& operation) {
  std::optional<Error> error = failure();
  if (!error && operation.withdrawn) {
    operation.request.call.seq = operation.number;
    error = Error(Code::cancelled, to_string(operation.request.call) + " was cancelled before it began");
  } else if (!error) {
    try {
      execute(operation);
    } catch (const Error& caught) {
      fail(cause_of(caught));
      error = failure();
    }
  }
  using State = Record::State;
  const bool cancelled = error && error->code() == Code::cancelled;
  recorder_.ended(operation.number, cancelled ? State::cancelled : error ? State::failed : State::done);
  if (const auto staging = std::move(operation.request.staging)) staging->finish(!error);
  operation.complete(std::move(error));
}

// Returns the error to report: other ranks may have found the cause before this rank saw its consequence.
Error Group::cause_of(const Error& caught) {
  Announcer announcer;
  {
    const std::lock_guard lock(mutex_);
    if (broken_) return *broken_;
    announcer = announcer_;
  }
  if (announcer) return announcer(caught);
  return caught.code() == Code::late ? Error(Code::rank_failed, caught.what(), caught.rank()) : caught;
}

void Group::execute(Operation& operation) {
  Request& request = operation.request;
  request.call.seq = seq_++;
  recorder_.started(operation.number, request.call);
  if (request.staging) await_device(*request.staging);
  if (config_.world == 1) return run_alone(operation);
  const Deadline end = deadline(request.timeout_s);
  if (hierarchy_) return hierarchy_->run(operation, end);
  run_on_host(*team_, operation, end);
}

// Waits until the input has come from the device.
void Group::await_device(const Staging& staging) {
  const auto check_failures = [this] {
    if (const auto error = failure()) throw Error(*error);
  };
  if (staging.await_input({0, deadline(), check_failures})) return;
  throw Error(Code::rank_failed,
              "rank " + std::to_string(config_.rank) +
                  ": timed out: the input was not copied from its device within the timeout",
              config_.rank);
}

std::optional<Error> Group::failure() {
  const std::lock_guard lock(mutex_);
  return broken_;
}

// Breaks the group on this rank, on the other ranks of this host, and on the links to other hosts.
// REQUIRES: mutex_ held.
void Group::break_with(const Error& error) {
  if (broken_) return;
  broken_ = error;
  changed_.notify_all();
  if (team_) team_->abort(error.rank() >= 0 ? error.rank() : config_.rank);
  if (transport_) transport_->abort();
}

void Group::fail(const Error& error) {
  if (fork_guard::generation() != generation_) return;  // the mutex may be locked: a thread of the parent held it
  const std::lock_guard lock(mutex_);
  break_with(error);
}

void Group::set_announcer(Announcer announcer) {
  const std::lock_guard lock(mutex_);
  announcer_ = std::move(announcer);
}

std::vector<int> Group::peers(const Request& request) {
  return hierarchy_ ? hierarchy_->peers(request) : std::vector<int>{};
}

void Group::add_outgoing(int rank, int fd) {
  if (!transport_) throw Error(Code::invalid, "a group of one host has no links");
  transport_->add_outgoing(rank, fd);
}

void Group::add_incoming(int rank, int fd) {
  if (!transport_) throw Error(Code::invalid, "a group of one host has no links");
  transport_->add_incoming(rank, fd);
}

void Group::set_rules(std::vector<Rule> rules) {
  if (hierarchy_) hierarchy_->set_rules(std::move(rules));
}

void Group::abort() { fail(Error(Code::collective, "the group was aborted")); }

}  // namespace ff::hfreduce
