// The replica of one target in its chain (docs/internals/fs3-chain.md): a state machine with no I/O, no clock and no
// thread.
//
// Thread contract: one thread at a time. `step` allocates only for pending work; an idle chunk costs no memory here,
// because its versions come from the Lookup.
//
// Invariants
// 1. A version is reported as present (Answer ok, Send, Reply ok, ServeRead) only after Applied{ok} of its Apply, or
//    when the Lookup had it at the start.
// 2. At most one job of a chunk is busy at a time, the first. In a SERVING replica each pending version has a busy job.
// 3. Each op of the shell gets one Reply or ServeRead; each payload one Release; each op of an Apply, Drop or Conclude
//    one Applied.
// 4. Between two Routings `updates_` holds the ops of the unanswered Updates. No Update that was sent has a `settled`
//    above the lowest of these ops.
//
// A restart keeps only the state of the store: entries, pending versions with their tags, floor, tags, the word
// "complete". A new Replica is made with the new incarnation and does nothing before its first Routing and Lease{true}.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "fs3/replica/actions.hpp"
#include "fs3/replica/events.hpp"
#include "fs3/replica/job.hpp"
#include "fs3/replica/lookup.hpp"

namespace ff::fs3::replica {

enum class Signal : std::uint8_t;  // transitions.hpp
enum class When : std::uint8_t;
enum class Do : std::uint8_t;
struct Transition;

struct Options {
  std::size_t page = 256;  // entries per Page
  std::size_t window = 8;  // chunks that a sync or recovery moves at a time
};

class Replica {
 public:
  Replica(TargetId target, Incarnation incarnation, const Lookup& lookup, Options options = {});
  Replica(const Replica&) = delete;
  Replica& operator=(const Replica&) = delete;

  template <class E>  // one of Event's alternatives; appends to `actions`
  void step(const E& event, Actions& actions) {
    out_ = &actions;
    on(event);
    settle();
    out_ = nullptr;
  }
  void step(const Event& event, Actions& actions) {
    std::visit([&](const auto& e) { step(e, actions); }, event);
  }

  TargetId target() const { return target_; }
  Incarnation incarnation() const { return incarnation_; }
  LocalState local() const { return local_; }  // the last LocalState; at first ONLINE, or FAULTY if incomplete
  ChainVersion chain_version() const { return chain_; }
  State role() const { return role_; }               // state in the chain, or OFFLINE if the replica must not act in it
  bool heads() const { return serving() && head_; }  // whether the target is the first SERVING one
  // Answer to a Read of that chunk at this time. serve: ServeRead of the Lookup's committed version, or Reply not_found
  // if there is none. refuse: Reply stale_routing. step: only step() can answer the Read.
  enum class ReadOutcome : std::uint8_t { serve, refuse, step };
  ReadOutcome read_outcome(ChunkId chunk, ChainVersion chain_version) const;
  std::size_t busy_chunks() const { return chunks_.size(); }  // chunks with jobs, pending versions or waiting reads
  // Number of awaited answers to Updates and other Sends, Applies and Drops. Requests that pause count, too.
  std::size_t outstanding() const { return updates_.size() + asks_.size() + applies_.size(); }

 private:
  // Most Applies of fetched contents for one job. If the disk damages all of them, a client's write on these contents
  // is answered `corrupt`, and a version to send counts as one without an intact copy.
  static constexpr std::uint8_t kMostRefetches = 3;
  using Jobs = std::list<Job>;
  struct Chunk {
    Version committed = 0;
    std::uint32_t length = 0;
    std::uint32_t pending_length = 0;
    Version pending = 0;  // durable pending version; 0: none
    bool removes = false;
    bool busy = false;  // the first job has begun
    Tag tag;            // tag of `pending`
    Jobs jobs;
    std::vector<Op> reads;  // parked: Reads that wait for the end of the pending version
    Version newest() const { return pending > committed ? pending : committed; }
  };
  using Chunks = std::unordered_map<ChunkId, Chunk>;
  using Place = Chunks::value_type;  // a chunk with its id

  // A Send that awaits an answer and is no Update.
  enum class Ask : std::uint8_t { page, sync_done, fetch, tags };
  struct Asked {
    Ask ask = Ask::page;
    TargetId to = 0;
    ChunkId chunk;        // fetch
    bool paused = false;  // waits for its Retry
  };
  struct Mine {  // newest write in flight here of a (client, channel)
    std::uint64_t seq = 0;
    ChunkId chunk;
  };
  // The walk over another target's index: made by the predecessor of a SYNCING target (sync), or by a RECOVERING target
  // (recovery). Phase compare is of a sync. Phases take, remove and tags are of a recovery, in this order.
  struct Walk {
    enum class Phase : std::uint8_t { none, compare, take, remove, tags, done };
    Phase phase = Phase::none;
    std::vector<TargetId> sources;
    std::size_t source = 0;   // index in `sources` of the target in turn
    ChunkId after;            // all chunks up to this one were compared
    bool asking = false;      // a PageAsk, SyncDone, TagsAsk or Conclude is in flight
    bool exhausted = false;   // all chunks of both indexes were compared
    Version floor = 1;        // floor of the source
    std::vector<Entry> todo;  // the source's entries that differ, in reverse order
    std::size_t running = 0;  // sync or take jobs of this walk that have not ended
  };

  // replica.cpp: roles, and answers that continue jobs
  void on(const Routing& routing);
  void on(const Lease& lease);
  void on(const Applied& applied);
  void on(const SendFailed& failed);
  void on(const Retry& retry);
  void on(const Answer& answer);
  void settle();
  void take_role(const Routing& routing);
  void regroup();
  void regroup(Place& place);
  void start_over(Job& job);
  void make_inherited(Place& place);
  void stop();
  void report_local_state();
  void old_apply_ended();
  bool serving() const { return role_ == State::serving; }
  bool leased() const { return lease_ && chain_ >= lease_version_; }
  bool head() const { return serving() && head_ && leased(); }

  // jobs.cpp: transitions and queues
  const Transition* transition(const Place& place, const Job& job, Signal signal) const;
  void raise(Place& place, Signal signal, Status status = Status::ok);
  bool holds(When when, const Place& place, const Job& job) const;
  std::optional<Signal> perform(Do action, Place& place, Job& job, Status status);
  bool needless(const Place& place, const Job& job) const;
  bool as_is(const Job& job) const;
  void withdraw(const Job& job);
  std::vector<ChunkId> sorted_chunks() const;
  Place& open(ChunkId chunk);
  template <class T>
  static T& add(Jobs& jobs) {
    return *jobs.emplace_back(std::in_place_type<T>).template as<T>();
  }
  void tidy(const Place& place);
  void proceed(Place& place);
  void finish(Place& place, Status status);
  Jobs::iterator remove(Place& place, Jobs::iterator job);
  Jobs::iterator remove_at(Place& place, Jobs::iterator job, Signal signal);
  void remove_front(Place& place);
  void forget_job(Job& job, ChunkId chunk);

  // writes.cpp: from clients and predecessors
  void on(const ClientWrite& write);
  void on(const Update& update);
  bool answered_by_tag(const ClientWrite& write);
  bool attach(Place& place, const Update& update);
  void register_channel(const Tag& tag, ChunkId chunk);
  void number(const Place& place, job::Write& write);
  void count(job::Write& write);
  void uncount(job::Write& write);
  bool may_apply(const job::Outgoing& write) const;
  void refuse_clients(job::Write& write);
  bool known(const Chunk& chunk, const job::Outgoing& update) const;
  bool follows(const Chunk& chunk, const job::ForwardedUpdate& update) const;
  void answer(Op op, TargetId to, ChainVersion chain_version, Status status);
  Op new_apply(const Place& place, Job& job);
  void apply(Place& place, Job& job, bool any_base);
  void accept(Place& place, Job& job);
  void overwrite(Place& place, Job& job);
  void applied(Place& place, const Applied& applied);
  void record(Place& place, const Job& job, std::uint32_t length);
  void set_committed(Place& place, Version version, bool removes, std::uint32_t length);
  void cannot_follow(Place& place, const Job& job);
  void send(Place& place, Job& job);
  void resend(Place& place, Job& job);
  void may_have_left(Job& job);
  void commit(Place& place, const Job& job);
  void end_syncs(Place& place);
  void drop(Place& place, Job& job, Status outcome);

  // reads.cpp
  void on(const Read& read);
  void serve_parked(Place& place);
  void refuse_parked(Place& place);

  // sync.cpp: the predecessor of a SYNCING target
  void on(const Page& page);
  bool agrees(const Place& place, const job::Sync& sync) const;
  void send_difference(Place& place, Job& job);
  void continue_sync();
  bool differs_for_sync(const Entry* mine, const Entry* theirs) const;
  bool successor_lags() const;
  void ask(Ask query, TargetId to, ChunkId chunk = {});
  void ask_again(Op op, const Asked& asked);
  void start_differences();

  // follow.cpp: the SYNCING target, and answers of a LASTSRV target
  void on(const PageAsk& ask);
  void on(const SyncDone& done);
  void on(const TagsAsk& ask);
  void on(const Fetch& fetch);
  void concluded(const Applied& applied);
  bool may_ask(TargetId from, ChainVersion chain_version) const;

  // recovery.cpp: the RECOVERING target
  void on(const Tags& tags);
  void start_recovery();
  job::Take take_of(const Entry& theirs) const;
  bool takes(const Chunk& chunk, const job::Take& take) const;
  void continue_recovery();
  bool differs_for_recovery(const Entry* mine, const Entry* theirs) const;

  // repair.cpp: contents from another replica
  void on(const Damaged& damaged);
  void on(const Fetched& fetched);
  static bool sends(Stage stage);
  static Version version_of(const Job& job);
  Version wanted(const Place& place) const;
  std::uint32_t wanted_crc(const Place& place) const;
  std::vector<TargetId> sources(const Job& job) const;
  std::optional<Signal> fetch(Place& place, Job& job);
  void fetch_later(Place& place, Job& job);
  void source_failed(Place& place, bool unanswered);
  void replace(Place& place, Job& job);
  void report_damage(const Place& place);
  bool unacknowledged(const Place& place, const Job& job) const;

  template <class A>
  void act(A&& action) {
    out_->emplace_back(std::forward<A>(action));
  }
  void reply(Op op, Status status, Version version = 0, std::uint32_t length = 0) {
    act(Reply{op, status, version, length});
  }
  void release(Payload& payload) {
    if (payload != 0) act(Release{payload});
    payload = 0;
  }

  const TargetId target_;
  const Incarnation incarnation_;
  const Lookup& lookup_;
  const Options options_;
  Actions* out_ = nullptr;

  // The chain by the last routing.
  ChainVersion chain_ = 0;
  std::vector<Member> members_;
  State state_ = State::offline;              // this target's state in the chain
  State role_ = State::offline;               // state_, or OFFLINE if this incarnation must not act in it
  bool head_ = false;                         // the first SERVING member
  TargetId predecessor_ = 0, successor_ = 0;  // 0: none
  bool successor_syncs_ = false;
  TargetId recovering_ = 0;  // the RECOVERING member
  bool lease_ = false;
  ChainVersion lease_version_ = 0;
  bool complete_;              // the store is a complete replica
  bool failed_ = false;        // the store reported io_error: the outcome of a change is unknown
  bool stopping_ = false;      // stop() is called at the end of this step
  bool stopped_ = false;       // stop() was called since this routing
  ChainVersion uptodate_ = 0;  // chain version in which a sync or recovery of this target ended
  LocalState local_;

  Version floor_;  // highest version of a removed chunk; 1 if none was removed, so versions of chunks begin at 2
  // Highest version dropped since the start. New versions are above it, so that no number is used twice.
  Version given_up_ = 0;
  Chunks chunks_;
  std::map<std::pair<std::uint64_t, std::uint32_t>, Mine> channels_;
  std::multiset<Version> creations_, removals_;  // versions of creations and removals in progress
  std::vector<ChunkId> held_;                    // chunks whose first job waits for creations_

  Op next_op_ = 1;
  Op routing_op_ = 1;              // the first op of this routing
  std::size_t old_ = 0;            // Applies, Drops and Concludes in flight that began before this routing
  Op settled_seen_ = 0;            // largest `settled` of the predecessor
  std::map<Op, Status> answered_;  // the predecessor's updates from settled_seen_ on, and their final answers
  std::map<Op, ChunkId> updates_;  // chunk of each unanswered Update
  std::map<Op, Asked> asks_;
  // Chunks with a pending version that recovery found on no LASTSRV target: no client got an acknowledgement of it.
  std::set<ChunkId> only_here_;
  std::unordered_map<Op, ChunkId> applies_;  // chunk of each Apply or Drop in flight
  Op conclude_ = 0;                          // op of the Conclude in flight
  Payload conclude_payload_ = 0;
  Op conclude_answer_ = 0;  // op of the SyncDone to answer when the Conclude has ended
  Walk walk_;
};

}  // namespace ff::fs3::replica
