#include "hfreduce/transport/ucx_worker.hpp"

#include <chrono>
#include <mutex>

#include "base/process/fork_guard.hpp"

namespace ff::hfreduce::ucx {
namespace {

constexpr int kTurns = 64;  // calls of worker_progress() before the caller checks for other work

// Count of living engines, and the process they belong to. In a forked child, UCX wrongly assumes that its thread runs.
struct LiveEngines {
  std::mutex mutex;
  unsigned generation = 0, alive = 0;
};

LiveEngines& live_engines() {
  static LiveEngines* const all = new LiveEngines;  // engines may outlive the statics of this library
  return *all;
}

void enter() {
  LiveEngines& all = live_engines();
  const std::lock_guard lock(all.mutex);
  const unsigned now = fork_guard::generation();
  if (all.alive > 0 && all.generation != now) {
    throw Error(Code::collective,
                "UCX does not work in a process that was forked while UCX was in use: start processes anew "
                "(spawn), or set FIREFLYER_HFREDUCE_TRANSPORT=tcp");
  }
  all.generation = now;
  ++all.alive;
}

void leave() {
  LiveEngines& all = live_engines();
  const std::lock_guard lock(all.mutex);
  --all.alive;
}

}  // namespace

Engine::Engine() : api_(ucx::api()) {
  enter();
  try {
    start();
  } catch (...) {
    stop();
    throw;
  }
}

Engine::~Engine() { stop(); }

void Engine::start() {
  Config* config = nullptr;
  check("ucp_config_read", api_.config_read(nullptr, nullptr, &config));
  ContextParams context{ContextParams::kFeatures, ContextParams::kTag | ContextParams::kWakeup};
  const Status status = api_.init(1, 11, &context, config, &context_);
  api_.config_release(config);
  check("ucp_init", status);
  WorkerParams worker{WorkerParams::kThreadMode, WorkerParams::kSerialized};
  check("ucp_worker_create", api_.worker_create(context_, &worker, &worker_));
  check("ucp_worker_get_efd", api_.worker_get_efd(worker_, &wakeup_));
  Address* address = nullptr;
  std::size_t bytes = 0;
  check("ucp_worker_get_address", api_.worker_get_address(worker_, &address, &bytes));
  address_.assign(reinterpret_cast<const char*>(address), bytes);
  api_.worker_release_address(worker_, address);
}

void Engine::stop() noexcept {
  if (worker_ != nullptr) api_.worker_destroy(worker_);
  if (context_ != nullptr) api_.cleanup(context_);
  leave();
}

Error Engine::error(const std::string& what, Status status) const {
  return {Code::collective, "UCX: " + what + ": " + api_.status_string(status)};
}

void Engine::check(const char* what, Status status) const {
  if (status != Status::ok) throw error(what, status);
}

bool Engine::progress() {
  bool any = false;
  for (int turn = 0; turn < kTurns && api_.worker_progress(worker_) != 0; ++turn) any = true;
  return any;
}

bool Engine::arm() {
  const Status status = api_.worker_arm(worker_);
  if (status == Status::busy) return false;
  check("ucp_worker_arm", status);
  return true;
}

void Engine::close(Endpoint* endpoint) noexcept {
  CallParams params{};
  params.mask = CallParams::kFlags;
  params.flags = CallParams::kForce;
  Request* request = api_.endpoint_close(endpoint, &params);
  if (request == nullptr || is_error(request)) return;
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  while (api_.request_status(request) == Status::in_progress && std::chrono::steady_clock::now() < limit) {
    api_.worker_progress(worker_);
  }
  api_.request_free(request);
}

}  // namespace ff::hfreduce::ucx
