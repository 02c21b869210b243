// A UCX context with one worker, with which a group sends and receives.
//
// Thread contract: one thread at a time. A copy in a forked child must be forgotten, not destroyed:
// it shares connections and devices with the parent.
#pragma once

#include <cstdint>
#include <string>

#include "base/error.hpp"
#include "hfreduce/transport/ucx_api.hpp"

namespace ff::hfreduce::ucx {

class Engine {
 public:
  // Throws Error(collective) without UCX, without a transport that UCX_TLS allows, and in a forked
  // child whose parent used UCX when it forked: UCX's own thread does not exist there.
  Engine();
  ~Engine();  // the user's memory is not accessed afterwards. REQUIRES: endpoints are closed
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const Api& api() const { return api_; }
  Worker* worker() const { return worker_; }
  int wakeup() const { return wakeup_; }  // readable when progress is due, after arm(); owned by the worker
  const std::string& address() const { return address_; }

  // Makes progress until nothing happens, for a limited number of turns; returns true if anything happened. The limit
  // lets the caller check for other work.
  bool progress();
  // Returns true if the descriptor reports events from now on, false if progress() is due.
  bool arm();
  // Ends an endpoint and all its operations. Never throws; gives up after a second.
  void close(Endpoint* endpoint) noexcept;
  Error error(const std::string& what, Status status) const;

 private:
  void check(const char* what, Status status) const;
  void start();
  void stop() noexcept;

  const Api& api_;
  Context* context_ = nullptr;
  Worker* worker_ = nullptr;
  int wakeup_ = -1;
  std::string address_;
};

}  // namespace ff::hfreduce::ucx
