// Requests from targets of this service to targets of other nodes: one connection per node, the outstanding requests on
// it, and their timeouts.
//
// Thread contract: as MessageSender; the other calls from any thread.
// Invariants
//   - Each request is either answered, or `failed` is called once: when its connection breaks, after kTimeout, or after
//     kPause if there is no connection.
//   - A message between two targets of this service is a job of the workers and needs no connection.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <unordered_map>
#include <vector>

#include "fs3/io/service/service.hpp"
#include "fs3/io/target/target.hpp"

namespace ff::fs3::io {

class Peers final : public MessageSender, public std::enable_shared_from_this<Peers> {
 public:
  static constexpr auto kTimeout = std::chrono::seconds(2);
  static constexpr auto kPause = std::chrono::milliseconds(20);
  static constexpr auto kCheckInterval = std::chrono::milliseconds(100);  // interval of checks for timed-out messages

  explicit Peers(Service& service);
  ~Peers() override;
  void stop();

  void post(std::weak_ptr<Target> from, Posted posted, Content content) override;
  void pause(std::weak_ptr<Target> target, replica::Op op) override;
  void aside(std::function<void()> job) override;

  void locate(TargetId target, std::uint32_t node);
  void connected(std::uint32_t node, std::shared_ptr<Service::Connection> connection);
  // Records that a message of the target arrived on this connection: messages to the target may use the connection.
  void remember_route(TargetId from, const std::shared_ptr<Service::Connection>& connection);
  void broken(const Service::Connection& connection);
  // Records the answer to the target's `op`. Returns false if the answer is too late, because `op` has timed out.
  bool answered(TargetId target, replica::Op op);
  std::vector<std::uint32_t> wanted() const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Asked {
    std::weak_ptr<Target> from;
    std::uint64_t connection = 0;  // 0: there was none
    Clock::time_point until;
  };
  using Key = std::pair<TargetId, replica::Op>;

  using GivenUp = std::vector<std::pair<std::weak_ptr<Target>, replica::Op>>;
  void give_up(std::unique_lock<std::mutex>& lock, const std::function<bool(const Asked&)>& which);
  void tick();

  Service& service_;
  mutable std::mutex mutex_;  // guards the members below
  std::unordered_map<TargetId, std::uint32_t> nodes_;
  std::unordered_map<std::uint32_t, std::shared_ptr<Service::Connection>> connections_;
  std::unordered_map<TargetId, std::shared_ptr<Service::Connection>> routes_;
  std::set<std::uint32_t> wanted_;
  std::map<Key, Asked> asked_;
  std::multimap<Clock::time_point, std::pair<std::weak_ptr<Target>, replica::Op>> pauses_;
  bool stopping_ = false;
  std::condition_variable woken_;
  std::thread ticker_;
};

}  // namespace ff::fs3::io
