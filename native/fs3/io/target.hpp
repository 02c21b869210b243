// The shell of one replica: its store, the bytes of its events, and the thread that makes them durable.
//
//   read, write, receive, ... (any thread) -> step under the lock -> actions in order
//        Apply: given to the store by the same thread once the lock is free; the syncer's sync() makes it Applied
//        Send:  given to the Courier; Reply, ServeRead: the callbacks, once the lock is free
//
// Thread contract: all calls from any thread. Callbacks come from any thread, without the lock, each exactly once; those
// still owed at `stop` come with stale_routing. The Courier must not call back from within `post`.
// Invariants
//   - Actions of one step are begun in their order, before those of the next step, but for Apply: nothing that follows
//     from an Apply is asked for before its Applied.
//   - No answer leaves and no read is begun when the lease has ended; it is looked at once for the reads of a frame.
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

#include "fs3/io/damage.hpp"
#include "fs3/io/messages.hpp"
#include "fs3/io/meter.hpp"
#include "fs3/io/wire.hpp"
#include "fs3/replica/replica.hpp"
#include "fs3/replica/store_lookup.hpp"
#include "fs3/store/store.hpp"

namespace ff::fs3::io {

class Target;

// Bytes that go along with an event or a message.
struct Content {
  std::shared_ptr<void> holder;  // of `bytes`
  std::span<const std::byte> bytes;
  std::vector<std::uint32_t> crcs;
  std::uint8_t hop = 0;  // how far from the client the target is to which it goes
};

// Brings messages to other targets. `failed` of the sender is told once for each message that asks and may stay
// without an answer.
class Courier {
 public:
  virtual ~Courier() = default;
  virtual void post(std::weak_ptr<Target> from, Posted posted, Content content) = 0;
  virtual void pause(std::weak_ptr<Target> target, replica::Op op) = 0;  // retry(op) after a while
  virtual void aside(std::function<void()> job) = 0;  // soon, by another thread; not at all once the service stops
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

  Target(std::shared_ptr<store::Disk> disk, store::Store store, TargetId target, std::uint32_t chain, replica::Incarnation incarnation,
         std::shared_ptr<Courier> courier);
  ~Target();
  void on_change(std::function<void()> call) { changed_ = std::move(call); }  // before `start`: report() is another
  void start();  // the syncer
  void stop();

  // What it is in its chain, as of its last step: where a service has several targets of a chain it chooses by this.
  enum class Seat : std::uint8_t { none, serving, head };
  Seat seat() const { return seat_.load(std::memory_order_relaxed); }

  TargetId id() const { return id_; }
  std::uint32_t chain() const { return chain_; }
  store::Store& store() { return store_; }

  // Reads of a frame, at most kMostEntries, under one lock. readings[number] of each that is answered at once is set;
  // `later` gets those of the others, maybe before this returns. Returns how many are answered at once. Statuses other
  // than ok come in a Reading too.
  std::size_t read(std::span<const Numbered> reads, std::span<store::Reading> readings, const Later& later);
  void write(const WriteEntry& entry, Content content, Wrote wrote);
  void receive(replica::Message message, Content content);
  void failed(replica::Op op);
  void retry(replica::Op op);
  void routing(const replica::Routing& routing);
  // The lease runs until then; `version` is the chain's at the manager when that was granted. It is never shortened.
  void lease(Clock::time_point until, ChainVersion version);
  // The chunk with the largest index of an inode, up to what is asked, as far as it is committed.
  void last(const QueryEntry& entry, QueryAnswer& answer);
  int descriptor(store::File file) const { return disk_->descriptor(file); }
  // The bytes of this chunk may fail their CRCs: they are read, and repaired if they do. What was damaged is looked at
  // again every few seconds in which this target serves, until it is whole: nobody may have been there to repair it from.
  void suspect(ChunkId chunk);

  // Of damage, since the last call.
  Damage::Findings findings();

  struct Counts {
    std::uint64_t groups = 0, applied = 0;    // syncs of the log, and writes that they made durable
    std::uint64_t checked = 0, damaged = 0;  // chunks read because of a suspicion, and those that were damaged
    std::uint64_t unrepaired = 0;            // chunks that were found damaged and not seen whole since
    Meter::Reading syncing;
  };
  Counts counts() const;

  struct Report {
    replica::LocalState local;
    ChainVersion chain_version = 0;
    replica::State role = replica::State::offline;
    bool failed = false;  // its store must be opened anew
    std::size_t busy_chunks = 0;
  };
  Report report() const;

 private:
  struct Asking {  // a client's write or a parked read
    Wrote wrote;
    Later later;
    Numbered read;
  };
  // What a step leaves to be done without the lock, in this order.
  struct Work {
    std::vector<std::pair<replica::Apply, Content>> applies;
    std::vector<std::function<void()>> calls;
  };
  struct Served {  // what becomes of a read
    Status status = Status::ok;
    Version version = 0;  // 0 and ok: the one that the store has as committed, or not_found
  };

  template <class E>
  void step_locked(const E& event, Work& work);
  template <class E>
  void step(const E& event);
  void look_at_lease(Work& work);
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
  bool deaf() const { return stopping_ || refused_; }  // REQUIRES: mutex_
  void doubt(ChunkId chunk, Status status);
  void look_again();
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
  const std::shared_ptr<Courier> courier_;
  std::function<void()> changed_;

  mutable std::mutex mutex_;  // guards what follows
  replica::Replica replica_;
  replica::Actions actions_;
  Clock::time_point lease_until_{};
  bool lease_runs_ = false;
  ChainVersion lease_version_ = 0;
  replica::Op next_op_ = 1;
  replica::Payload next_payload_ = 1;
  std::unordered_map<replica::Payload, Content> contents_;
  std::unordered_map<replica::Op, Asking> asking_;
  std::size_t hop_ = 1;  // of its successor
  replica::Op direct_op_ = 0;                  // of the first read of those that are being stepped
  std::span<std::optional<Served>> direct_;    // their answers, as far as they get them in their step
  std::vector<replica::Op> riding_;  // Drops and Concludes that the next sync makes durable
  bool stopping_ = false;
  bool refused_ = false;  // the store did not take what it must: nothing happens until it is opened anew
  std::atomic<Seat> seat_ = Seat::none;

  Damage damage_;
  bool looking_ = false;  // at what was due of it

  std::condition_variable queued_;
  std::size_t applied_ = 0;  // Applies given to the store since the last sync
  bool dirty_ = false;       // something else was
  std::thread syncer_;

  std::atomic<std::uint64_t> groups_ = 0, made_durable_ = 0, checked_ = 0, damaged_ = 0;
  Meter syncing_;
};

}  // namespace ff::fs3::io
