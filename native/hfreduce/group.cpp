#include "hfreduce/group.hpp"

#include "hfreduce/arena.hpp"

namespace ff::hfreduce {

bool Operation::wait(double seconds) {
  std::unique_lock lock(mutex_);
  if (seconds < 0) {
    over_.wait(lock, [this] { return done_; });
    return true;
  }
  return over_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return done_; });
}

bool Operation::done() {
  const std::lock_guard lock(mutex_);
  return done_;
}

void Operation::rethrow() {
  const std::lock_guard lock(mutex_);
  if (error_) throw Error(*error_);
}

void Operation::complete(std::optional<Error> error) {
  const std::lock_guard lock(mutex_);
  error_ = std::move(error);
  done_ = true;
  over_.notify_all();
}

Group::Group(Config config, std::unique_ptr<Team> team, std::unique_ptr<Ring> ring)
    : config_(config), timeout_s_(config.timeout_s), team_(std::move(team)), ring_(std::move(ring)) {}

Group::~Group() {
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

std::shared_ptr<Operation> Group::allreduce(void* data, std::size_t count, DType dtype, ReduceOp op,
                                            bool run_here) {
  auto operation = std::make_shared<Operation>();
  operation->data_ = static_cast<char*>(data);
  operation->count_ = count;
  operation->dtype_ = dtype;
  operation->op_ = op;
  {
    const std::lock_guard lock(mutex_);
    if (!run_here || running_ || !queue_.empty()) {
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
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return (closing_ || !queue_.empty()) && !running_; });
    if (queue_.empty()) return;
    const auto operation = queue_.front();
    queue_.pop_front();
    running_ = true;
    lock.unlock();
    run(*operation);
    lock.lock();
    running_ = false;
    changed_.notify_all();
  }
}

void Group::run(Operation& operation) {
  std::optional<Error> error;
  {
    const std::lock_guard lock(mutex_);
    error = broken_;
  }
  if (!error) {
    try {
      execute(operation);
    } catch (const Error& caught) {
      const std::lock_guard lock(mutex_);
      break_with(caught);
      error = broken_;  // the first failure, which may be why this one came about
    }
  }
  operation.complete(std::move(error));
}

void Group::execute(Operation& operation) {
  const Call call{seq_++, operation.count_, operation.dtype_, operation.op_};
  const double scale = operation.op_ == ReduceOp::avg ? 1.0 / config_.world : 1.0;
  const auto deadline =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(
                         std::chrono::duration<double>(timeout_s_.load()));
  Operand mine{operation.data_, -1, 0};
  if (const auto place = Arena::of_process().find(operation.data_,
                                                  call.count * size_of(call.dtype))) {
    mine.segment = place->segment;
    mine.offset = place->offset;
  }
  if (config_.hosts == 1) {
    if (team_) team_->allreduce(call, mine, scale, deadline);
    return;
  }
  const std::size_t lane = team_ ? team_->me() : 0;
  if (team_) team_->reduce_scatter(call, mine, config_.lanes, deadline);
  if (ring_) {
    const std::size_t begin = slice_begin(call.count, call.dtype, lane, config_.lanes);
    const std::size_t end = slice_begin(call.count, call.dtype, lane + 1, config_.lanes);
    ring_->allreduce(call, mine.data + begin * size_of(call.dtype), end - begin, scale, deadline);
  }
  if (team_) team_->all_gather(config_.lanes, deadline);
}

// Tells the others, so that one error ends the group everywhere and not only here. REQUIRES: mutex_ held.
void Group::break_with(const Error& error) {
  if (broken_) return;
  broken_ = error;
  if (team_) team_->abort(error.rank() >= 0 ? error.rank() : config_.rank);
  if (ring_) ring_->abort();
}

void Group::fail(const Error& error) {
  const std::lock_guard lock(mutex_);
  break_with(error);
}

void Group::abort() {
  const std::lock_guard lock(mutex_);
  break_with(Error(Code::collective, "the group was aborted"));
}

}  // namespace ff::hfreduce
