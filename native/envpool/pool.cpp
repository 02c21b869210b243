#include "envpool/pool.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <string>
#include <system_error>
#include <utility>

#include "base/error.hpp"
#include "base/process/fork_guard.hpp"
#include "envpool/classic.hpp"
#include "envpool/random.hpp"

namespace ff::envpool {
namespace {

// For less queued work than this, no thread is woken, because the receiver alone finishes it sooner.
constexpr double kWakingNs = 100'000;
constexpr std::size_t kChunk = 64;  // maximum number of environments that a thread takes at a time
constexpr double kReset = std::numeric_limits<double>::quiet_NaN();

template <class Task>
class TaskPool final : public Pool {
 public:
  TaskPool(int environments, int threads, std::uint64_t seed)
      : Pool({Task::kState, Task::kObservation, Task::kActions, Task::kLimit}, environments, threads),
        slots_(static_cast<std::size_t>(environments)) {
    draw_anew(seed);
  }
  ~TaskPool() override { stop(); }

 protected:
  Outcome step(int id, double action) override {
    Slot& slot = slots_[static_cast<std::size_t>(id)];
    Outcome outcome;
    if (slot.over || std::isnan(action)) {
      Task::reset(slot.random, slot.state);
      begin_episode(id);
    } else {
      outcome.terminated = Task::step(slot.state, action, outcome.reward);
      outcome.truncated = ++slot.steps >= Task::kLimit;
      slot.over = outcome.terminated || outcome.truncated;
    }
    Task::observe(slot.state, observation(id));
    return outcome;
  }

  void draw_anew(std::uint64_t seed) override {
    std::uint64_t number = 0;
    for (Slot& slot : slots_) {
      slot.random = Random(seed + number++ * 0xd1342543de82ef95);
      slot.over = true;
    }
  }

  double* state(int id) override { return slots_[static_cast<std::size_t>(id)].state; }

  void begin_episode(int id) override {
    slots_[static_cast<std::size_t>(id)].steps = 0;
    slots_[static_cast<std::size_t>(id)].over = false;
  }

 private:
  struct alignas(64) Slot {  // no two threads share a cache line
    double state[Task::kState];
    Random random;
    int steps = 0;
    bool over = true;  // the next step resets
  };
  std::vector<Slot> slots_;
};

template <class Task>
std::unique_ptr<Pool> made(int environments, int threads, std::uint64_t seed) {
  return std::make_unique<TaskPool<Task>>(environments, threads, seed);
}

}  // namespace

std::unique_ptr<Pool> Pool::make(std::string_view task, int environments, int threads, std::uint64_t seed) {
  if (environments < 1 || threads < 1) {
    throw Error(Code::invalid, "a pool needs at least one environment and one thread");
  }
  constexpr std::pair<std::string_view, std::unique_ptr<Pool> (*)(int, int, std::uint64_t)> kTasks[] = {
      {"CartPole-v1", made<CartPole>},       {"Pendulum-v1", made<Pendulum>},
      {"MountainCar-v0", made<MountainCar>}, {"MountainCarContinuous-v0", made<MountainCarContinuous>},
      {"Acrobot-v1", made<Acrobot>},
  };
  for (const auto& [name, make] : kTasks) {
    if (name == task) return make(environments, threads, seed);
  }
  throw Error(Code::invalid, "there is no native task " + std::string(task));
}

void Pool::Queue::push(std::int32_t id) {
  std::size_t place = first_ + size_++;
  if (place >= ids_.size()) place -= ids_.size();
  ids_[place] = id;
}

std::int32_t Pool::Queue::pop() {
  const std::int32_t id = ids_[first_];
  if (++first_ == ids_.size()) first_ = 0;
  --size_;
  return id;
}

Pool::Pool(const Shape& shape, int environments, int threads)
    : shape_(shape),
      phases_(static_cast<std::size_t>(environments)),
      actions_(phases_.size()),
      outcomes_(phases_.size()),
      observations_(phases_.size() * static_cast<std::size_t>(shape.observation)),
      queued_(environments),
      stepped_(environments),
      generation_(fork_guard::generation()) {
  try {
    for (int i = 1; i < threads; ++i) threads_.emplace_back([this] { work(); });
  } catch (const std::system_error&) {
    stop();
    throw Error(Code::invalid, "the system cannot start " + std::to_string(threads) + " threads; use fewer");
  }
}

void Pool::stop() {
  // The threads, one of which may hold the lock, exist only in the parent.
  if (generation_ != fork_guard::generation()) {
    for (std::thread& thread : threads_) fork_guard::forget(thread);
    fork_guard::forget(queued_more_);
    fork_guard::forget(stepped_more_);
    return;
  }
  {
    const std::scoped_lock lock(mutex_);
    stopping_ = true;
  }
  queued_more_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Pool::require_threads() const {
  if (generation_ != fork_guard::generation()) {
    throw Error(Code::invalid, "this pool belongs to the parent process; make one after the fork");
  }
}

void Pool::require_idle(const char* what) const {
  if (std::ranges::any_of(phases_, [](Phase phase) { return phase != Phase::idle; })) {
    throw Error(Code::invalid, std::string(what) + " while environments are under way; receive them first");
  }
}

void Pool::send(std::span<const std::int32_t> ids, std::span<const double> actions) {
  require_threads();
  if (!actions.empty() && actions.size() != ids.size()) {
    throw Error(Code::invalid,
                std::to_string(actions.size()) + " actions for " + std::to_string(ids.size()) + " environments");
  }
  for (const double action : actions) {
    const bool known = shape_.actions == 0 ? !std::isnan(action)
                                           : action >= 0 && action < shape_.actions && action == std::floor(action);
    if (!known) {
      throw Error(Code::invalid,
                  "no action " + std::to_string(action) + ": expected " +
                      (shape_.actions == 0 ? std::string("a number") : "0 to " + std::to_string(shape_.actions - 1)));
    }
  }
  const std::scoped_lock lock(mutex_);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const bool exists = ids[i] >= 0 && ids[i] < size();
    if (exists && phases_[static_cast<std::size_t>(ids[i])] == Phase::idle) {
      phases_[static_cast<std::size_t>(ids[i])] = Phase::queued;
      continue;
    }
    for (const std::int32_t id : ids.first(i)) phases_[static_cast<std::size_t>(id)] = Phase::idle;
    throw Error(Code::invalid, "environment " + std::to_string(ids[i]) +
                                   (exists ? " is under way; receive it first" : " does not exist"));
  }
  for (std::size_t i = 0; i < ids.size(); ++i) {
    actions_[static_cast<std::size_t>(ids[i])] = actions.empty() ? kReset : actions[i];
    queued_.push(ids[i]);
  }
  if (!threads_.empty() && static_cast<double>(queued_.size()) * step_ns_ > kWakingNs) queued_more_.notify_all();
}

// Steps at most `most` of the queued environments. Releases the lock meanwhile.
void Pool::step_some(std::unique_lock<std::mutex>& lock, std::size_t most, std::vector<std::int32_t>& chunk) {
  chunk.clear();
  while (chunk.size() < most && queued_.size() > 0) chunk.push_back(queued_.pop());
  running_ += chunk.size();
  lock.unlock();
  const auto begin = std::chrono::steady_clock::now();
  for (const std::int32_t id : chunk) {
    outcomes_[static_cast<std::size_t>(id)] = step(id, actions_[static_cast<std::size_t>(id)]);
  }
  const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begin;
  lock.lock();
  running_ -= chunk.size();
  for (const std::int32_t id : chunk) {
    phases_[static_cast<std::size_t>(id)] = Phase::stepped;
    stepped_.push(id);
  }
  step_ns_ += 0.1 * (took.count() / static_cast<double>(chunk.size()) - step_ns_);
}

void Pool::work() {
  std::vector<std::int32_t> chunk;
  std::unique_lock lock(mutex_);
  while (true) {
    queued_more_.wait(lock, [this] { return stopping_ || queued_.size() > 0; });
    if (stopping_) return;
    const std::size_t share = queued_.size() / (threads_.size() + 1);
    step_some(lock, std::clamp<std::size_t>(share, 1, kChunk), chunk);
    if (receiving_) stepped_more_.notify_one();
  }
}

void Pool::receive(const Results& results) {
  require_threads();
  const std::size_t wanted = results.ids.size();
  std::unique_lock lock(mutex_);
  if (wanted > stepped_.size() + queued_.size() + running_) {
    throw Error(Code::invalid, std::to_string(wanted) + " environments wanted, " +
                                   std::to_string(stepped_.size() + queued_.size() + running_) + " under way");
  }
  while (stepped_.size() < wanted) {
    if (queued_.size() > 0) {
      const std::size_t share = queued_.size() / (threads_.size() + 1);
      const std::size_t most = threads_.empty() ? wanted : std::clamp<std::size_t>(share, 1, kChunk);
      step_some(lock, std::min(most, wanted - stepped_.size()), chunk_);
    } else {
      receiving_ = true;
      stepped_more_.wait(lock);
      receiving_ = false;
    }
  }
  for (std::int32_t& id : results.ids) id = stepped_.pop();
  lock.unlock();  // no other thread uses the taken environments until they are idle
  if (wanted == phases_.size()) std::ranges::sort(results.ids);
  const auto width = static_cast<std::size_t>(shape_.observation);
  for (std::size_t i = 0; i < wanted; ++i) {
    const auto id = static_cast<std::size_t>(results.ids[i]);
    std::copy_n(&observations_[id * width], width, results.observations + i * width);
    results.rewards[i] = outcomes_[id].reward;
    results.terminated[i] = outcomes_[id].terminated;
    results.truncated[i] = outcomes_[id].truncated;
  }
  lock.lock();
  for (const std::int32_t id : results.ids) phases_[static_cast<std::size_t>(id)] = Phase::idle;
}

void Pool::seed(std::uint64_t seed) {
  require_threads();
  const std::scoped_lock lock(mutex_);
  require_idle("new seeds");
  draw_anew(seed);
}

void Pool::states(std::span<double> states) const {
  require_threads();
  const std::scoped_lock lock(mutex_);
  require_idle("states are read");
  auto& self = const_cast<Pool&>(*this);
  for (int id = 0; id < size(); ++id) {
    std::copy_n(self.state(id), shape_.state, &states[static_cast<std::size_t>(id) * shape_.state]);
  }
}

void Pool::set_states(std::span<const double> states) {
  require_threads();
  const std::scoped_lock lock(mutex_);
  require_idle("states are set");
  for (int id = 0; id < size(); ++id) {
    std::copy_n(&states[static_cast<std::size_t>(id) * shape_.state], shape_.state, state(id));
    begin_episode(id);
  }
}

}  // namespace ff::envpool
