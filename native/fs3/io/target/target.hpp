// The shell of one replica: its store, the bytes of its events, and the thread that makes them durable.
//
//   read, write, receive, ... (any thread) -> step under the lock -> actions in order
//        Apply: given to the store by the same thread after unlocking; the syncer's sync() makes it Applied
//        Send:  given to the MessageSender; Reply, ServeRead: the callbacks, after unlocking
//
// Thread contract: all calls from any thread. Each callback is called exactly once, from any thread, without the lock.
// Callbacks pending at `stop` are called with stale_routing. The MessageSender must not call back from within `post`.
// Invariants
//   - The actions of one step begin in their order, before the actions of the next step. Only an Apply may begin later:
//     the replica requests no action that depends on the Apply before it gets the event Applied.
//   - No answer is sent and no read begins after the lease has ended; the lease is checked once for the reads of a
//     frame.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <unordered_map>
#include <vector>

#include "fs3/io/service/meter.hpp"
#include "fs3/io/target/damage.hpp"
#include "fs3/io/wire/messages.hpp"
#include "fs3/io/wire/wire.hpp"
#include "fs3/replica/replica.hpp"
#include "fs3/replica/store_lookup.hpp"
#include "fs3/store/store.hpp"

namespace ff::fs3::io {

class Target;

// Bytes that accompany an event or a message.
struct Content {
  std::shared_ptr<void> holder;  // owner of `bytes`
  std::span<const std::byte> bytes;
  std::vector<std::uint32_t> crcs;
  std::uint8_t hop = 0;  // number of hops from the client to the target that receives the bytes
};

// Sends messages to other targets. Calls the sending target's `failed` once for each request that may stay unanswered.
class MessageSender {
 public:
  virtual ~MessageSender() = default;
  virtual void post(std::weak_ptr<Target> from, Posted posted, Content content) = 0;
  virtual void pause(std::weak_ptr<Target> target, replica::Op op) = 0;  // calls retry(op) after a while
  virtual void aside(std::function<void()> job) = 0;  // runs the job soon on another thread; drops it after a stop
};

class Target : public std::enable_shared_from_this<Target> {
 public:
  using Clock = std::chrono::steady_clock;
  using Later = std::function<void(std::size_t number, store::Reading)>;
  struct Numbered {
    std::size_t number;
    ReadEntry entry;
  };
  using Wrote = std::function<void(Status, Version, std::uint32_t length)>;

  Target(std::shared_ptr<store::Disk> disk, store::Store store, TargetId target, std::uint32_t chain,
         replica::Incarnation incarnation, std::shared_ptr<MessageSender> sender);
  ~Target();
  // Sets the function to call when report() has changed. REQUIRES: `start` was not called yet.
  void on_change(std::function<void()> call) { changed_ = std::move(call); }
  void start();  // starts the syncer
  void stop();

  // The target's role in its chain as of its last step. A service with several targets of one chain chooses a target by
  // role.
  enum class Role : std::uint8_t { none, serving, head };
  Role role() const { return role_.load(std::memory_order_relaxed); }

  TargetId id() const { return id_; }
  std::uint32_t chain() const { return chain_; }
  store::Store& store() { return store_; }

  // Reads entries of a frame, at most kMostEntries, under one lock. Sets readings[number] of each read that is answered
  // at once, and returns how many were. `later` gets the other readings, possibly before this call returns. A status
  // other than ok also comes in a Reading.
  std::size_t read(std::span<const Numbered> reads, std::span<store::Reading> readings, const Later& later);
  void write(const WriteEntry& entry, Content content, Wrote wrote);
  void receive(replica::Message message, Content content);
  void failed(replica::Op op);
  void retry(replica::Op op);
  void routing(const replica::Routing& routing);
  // Extends the lease to `until`; never shortens the lease. `version`: version of the chain at the manager when it
  // granted the lease.
  void lease(Clock::time_point until, ChainVersion version);
  // Finds the committed chunk of an inode with the largest index up to `entry.upto`.
  void last(const QueryEntry& entry, QueryAnswer& answer);
  int descriptor(store::File file) const { return disk_->descriptor(file); }
  // Reads a chunk whose bytes may fail their CRCs, and repairs it if they do. While this target serves, it rechecks a
  // damaged chunk every few seconds until the chunk is whole. An earlier repair fails if no replica has intact bytes.
  void suspect(ChunkId chunk);

  // Findings of damage since the last call.
  Damage::Findings findings();

  struct Counts {
    std::uint64_t groups = 0, applied = 0;   // syncs of the log, and writes that they made durable
    std::uint64_t checked = 0, damaged = 0;  // suspected chunks that were read, and those found damaged
    std::uint64_t unrepaired = 0;            // chunks found damaged and not seen whole since
    Meter::Reading syncing;                  // durations of the syncs
  };
  Counts counts() const;

  struct Report {
    replica::LocalState local;
    ChainVersion chain_version = 0;
    replica::State role = replica::State::offline;
    bool failed = false;  // its store must be reopened
    std::size_t busy_chunks = 0;
  };
  Report report() const;

 private:
  struct Asking {  // a client's write or a parked read
    Wrote wrote;
    Later later;
    Numbered read;
  };
  // Work of a step to be done without the lock, in this order.
  struct Work {
    std::vector<std::pair<replica::Apply, Content>> applies;
    std::vector<std::function<void()>> calls;
  };
  struct Served {  // the result of a read
    Status status = Status::ok;
    Version version = 0;  // 0 and ok: the store's committed version, or not_found
  };

  template <class E>
  void step_locked(const E& event, Work& work);
  template <class E>
  void step(const E& event);
  void check_lease(Work& work);
  void carry_out(const replica::Action& action, Work& work);
  void carry_out(const replica::Mark&);
  void carry_out(const replica::Conclude& conclude);
  void carry_out(const replica::Send& send, Work& work);
  void carry_out(const replica::Reply& reply, Work& work);
  void carry_out(const replica::ServeRead& serve, Work& work);
  void decide(std::span<const Numbered> reads, const Later& later, std::span<std::optional<Served>> served);
  void confirm(std::span<const Numbered> reads, std::span<const std::optional<Served>> served,
               std::span<store::Reading> readings);
  bool keep_direct(replica::Op op, Served served);
  bool resolve(const Numbered& read, Served served, const Later& later, store::Reading& to);
  void answer_read(Asking asking, Served served, Work& work);
  void do_work(Work& work);
  void give(const replica::Apply& apply, const Content& content);
  std::optional<store::Reading> read_version(const ReadEntry& entry, Version version);
  Content contents_of(ChunkId chunk, Version version, bool as_is, Status& status);
  void accepted(Status status, Work& work);
  bool ignores_events() const { return stopping_ || refused_; }  // REQUIRES: mutex_
  void on_failed_read(ChunkId chunk, Status status);
  void recheck_damaged();
  std::vector<std::byte> tags_of(bool settled) const;
  void ride(replica::Op op);
  void sync_always();
  bool sync_once();
  replica::Payload keep(Content content);

  const std::shared_ptr<store::Disk> disk_;
  const TargetId id_;
  const std::uint32_t chain_;
  store::Store store_;
  const replica::StoreLookup lookup_;
  const std::shared_ptr<MessageSender> sender_;
  std::function<void()> changed_;

  mutable std::mutex mutex_;  // guards the members below
  replica::Replica replica_;
  replica::Actions actions_;
  Clock::time_point lease_until_{};
  bool lease_runs_ = false;
  ChainVersion lease_version_ = 0;
  replica::Op next_op_ = 1;
  replica::Payload next_payload_ = 1;
  std::unordered_map<replica::Payload, Content> contents_;
  std::unordered_map<replica::Op, Asking> asking_;
  std::size_t hop_ = 1;                      // hop of the successor
  replica::Op direct_op_ = 0;                // op of the first read in the current step
  std::span<std::optional<Served>> direct_;  // answers of the step's reads, if the step gives them
  std::vector<replica::Op> riding_;          // Drops and Concludes that the next sync makes durable
  bool stopping_ = false;
  bool refused_ = false;  // the store refused a mandatory change: the target stops until the store is reopened
  std::atomic<Role> role_ = Role::none;

  Damage damage_;
  bool rechecking_ = false;  // the syncer is checking chunks that were due

  std::condition_variable queued_;
  std::size_t applied_ = 0;  // Applies given to the store since the last sync
  bool dirty_ = false;       // another change was given to the store since the last sync
  std::thread syncer_;

  std::atomic<std::uint64_t> groups_ = 0, made_durable_ = 0, checked_ = 0, damaged_ = 0;
  Meter syncing_;
};

}  // namespace ff::fs3::io
