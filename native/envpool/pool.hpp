// Steps many environments by a few threads (EnvPool, arXiv 2206.10558).
//
// send() queues an action for each of the given environments; receive() returns the environments whose steps were done
// first. Threads take environments from the queue in chunks. The thread that waits in receive() (the receiver) takes
// some, too. If the queued work costs less than waking a thread, the receiver does all of it.
//
// An environment is idle, queued or stepped, and only one thread at a time steps it. A trajectory therefore depends on
// its seed and actions, not on the threads. Only one thread at a time may call the public methods.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <thread>
#include <vector>

namespace ff::envpool {

struct Shape {
  int state;        // doubles of a state
  int observation;  // floats of an observation
  int actions;      // number of discrete actions; 0: one real number
  int limit;        // steps after which an episode is truncated
};

// Output arrays of receive(): an element, or a row of `observation` floats, for each of `ids.size()` environments.
struct Results {
  std::span<std::int32_t> ids;
  float* observations;
  double* rewards;
  std::uint8_t* terminated;
  std::uint8_t* truncated;
};

class Pool {
 public:
  // Makes a pool of a task. `threads` includes the thread that calls receive(). Throws Code::invalid if there is no
  // such task.
  static std::unique_ptr<Pool> make(std::string_view task, int environments, int threads, std::uint64_t seed);

  virtual ~Pool() = default;
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  const Shape& shape() const { return shape_; }
  int size() const { return static_cast<int>(phases_.size()); }

  // Queues a step of each environment; a reset if `actions` is empty. Throws Code::invalid, and queues nothing,
  // if an environment does not exist or is not idle, or if an action does not exist.
  void send(std::span<const std::int32_t> ids, std::span<const double> actions);

  // Waits until `results.ids.size()` environments are stepped, and makes them idle. If that is the whole pool, the
  // results are sorted by id. Throws Code::invalid if fewer are under way (queued or stepped).
  void receive(const Results& results);

  // Restarts all streams of random numbers from `seed`. Throws Code::invalid unless all environments are idle, as
  // states() and set_states() do.
  void seed(std::uint64_t seed);
  void states(std::span<double> states) const;
  // Begins an episode of each environment in the given state. No observation of that state is returned.
  void set_states(std::span<const double> states);

 protected:
  Pool(const Shape& shape, int environments, int threads);
  void stop();  // REQUIRED in destructors of derived classes, because the threads call the derived step()

  struct Outcome {
    double reward = 0;
    bool terminated = false, truncated = false;
  };
  virtual Outcome step(int id, double action) = 0;  // an action of NaN resets
  virtual void draw_anew(std::uint64_t seed) = 0;
  virtual double* state(int id) = 0;
  virtual void begin_episode(int id) = 0;

  float* observation(int id) { return &observations_[static_cast<std::size_t>(id) * shape_.observation]; }

 private:
  enum class Phase : std::uint8_t { idle, queued, stepped };

  // A first-in, first-out queue of environments. It holds each environment at most once.
  class Queue {
   public:
    explicit Queue(int room) : ids_(static_cast<std::size_t>(room)) {}
    std::size_t size() const { return size_; }
    void push(std::int32_t id);
    std::int32_t pop();

   private:
    std::vector<std::int32_t> ids_;
    std::size_t first_ = 0, size_ = 0;
  };

  void work();
  void step_some(std::unique_lock<std::mutex>& lock, std::size_t most, std::vector<std::int32_t>& chunk);
  void require_idle(const char* what) const;
  void require_threads() const;

  const Shape shape_;
  std::vector<Phase> phases_;
  std::vector<double> actions_;
  std::vector<Outcome> outcomes_;
  std::vector<float> observations_;

  mutable std::mutex mutex_;
  std::condition_variable queued_more_, stepped_more_;
  Queue queued_, stepped_;  // guarded by mutex_, as are the members up to step_ns_
  std::size_t running_ = 0;
  bool receiving_ = false, stopping_ = false;
  double step_ns_ = 1000;            // duration of a step: moving average over chunks
  std::vector<std::int32_t> chunk_;  // chunk of the receiver
  std::vector<std::thread> threads_;
  const unsigned generation_;  // fork generation of the process: a forked child has no threads
};

}  // namespace ff::envpool
