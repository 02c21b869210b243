// Jobs: the work that a replica has to do on one chunk, in a queue of the chunk. Each kind of job is a type with the
// fields that the kind uses. transitions.hpp has the transitions between the stages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "fs3/replica/events.hpp"

namespace ff::fs3::replica {

enum class JobKind : std::uint8_t { client_write, forwarded_update, inherited, sync, take, repair };

enum class Stage : std::uint8_t {
  waiting,         // in the queue of the chunk
  held,            // a client's write has its number; a removal waits for creations with versions up to its own
  applying,        // Apply of the job's version in flight
  sending,         // Update in flight to the successor, or paused
  fetching,        // Fetch of the job's version in flight, or paused
  replacing,       // Apply of fetched contents of the job's version in flight
  fetching_base,   // Fetch of the committed version in flight, or paused
  replacing_base,  // Apply of fetched contents of the committed version in flight
  dropping,        // Drop of the job's version in flight
  done,            // the job is removed
  same,            // in a transition: the stage does not change
};

namespace job {

// A version that goes to the successor.
struct Outgoing {
  Kind kind = Kind::write;
  bool whole = false;      // sent as REPLACE
  bool as_is = false;      // sent even if the bytes fail their CRCs
  bool committed = false;  // committed here, or its Apply commits it
  bool paused = false;     // waits for the Retry of the Update
  Version base = 0, version = 0;
};

// An Outgoing version that a client or the predecessor waits for.
struct Write : Outgoing {
  Status outcome = Status::ok;  // status to answer after a Drop of the version
  bool counted = false;         // `version` is in the replica's creations_ or removals_
  ChainVersion chain = 0;       // chain version of the Update that `answer` names
  Op answer = 0;                // op of the predecessor's Update to answer; 0: none
  Tag tag;
  std::vector<Op> clients;  // ops of the ClientWrites to answer
};

struct Bytes {
  std::uint32_t offset = 0, length = 0;
  Payload payload = 0;
};

// A client's write, which this target received as the head.
struct ClientWrite : Write {
  Bytes bytes;
  bool left = false;  // an Update of the version may have reached the successor
};

// An Update of the predecessor.
struct ForwardedUpdate : Write {
  Bytes bytes;
  bool forget = false;
};

// A pending version that no job completes: it is from before a restart, or from another role.
struct Inherited : Write {};

// A chunk that differs at the SYNCING successor. A removal is sent with `forget`.
struct Sync : Outgoing {
  Entry seen;              // the successor's entry
  ChainVersion chain = 0;  // chain version of the walk that made the job
};

// A version that the RECOVERING target lacks: its contents, or its removal.
struct Take {
  Kind kind = Kind::replace;
  bool as_is = false;      // fetched from `peer` even if the bytes fail their CRCs
  TargetId peer = 0;       // the LASTSRV target that has the version
  ChainVersion chain = 0;  // chain version of the walk that made the job
  Version version = 0;
  Entry seen;  // entry of `peer`
};

// Damaged contents of the committed version.
struct Repair {};

using Any = std::variant<ClientWrite, ForwardedUpdate, Inherited, Sync, Take, Repair>;

}  // namespace job

// The search of a job for intact contents at other replicas.
struct Search {
  std::uint8_t refetches = 0;  // Applies of fetched contents that have ended, also refused ones; at most kMostRefetches
  bool unanswered = false;     // a source of this round did not answer, or refused the Fetch
  std::uint32_t tried = 0;     // number of sources of this round that failed
  Payload fetched = 0;         // contents that arrived, until their Apply ends
};

struct Job {
  template <class T>
  explicit Job(std::in_place_type_t<T> kind) : of(kind) {}

  JobKind kind() const { return static_cast<JobKind>(of.index()); }
  template <class T>  // null for other kinds
  T* as() {
    return std::get_if<T>(&of);
  }
  template <class T>
  const T* as() const {
    return std::get_if<T>(&of);
  }
  job::Outgoing* outgoing() { return base<job::Outgoing>(*this); }  // null for take and repair
  const job::Outgoing* outgoing() const { return base<const job::Outgoing>(*this); }
  job::Write* write() { return base<job::Write>(*this); }  // null for sync, take and repair
  const job::Write* write() const { return base<const job::Write>(*this); }
  job::Bytes* bytes() {  // null unless the job came with bytes
    if (auto* client = as<job::ClientWrite>()) return &client->bytes;
    auto* update = as<job::ForwardedUpdate>();
    return update != nullptr ? &update->bytes : nullptr;
  }

  Stage stage = Stage::waiting;
  Op op = 0;  // op of the Apply, Drop, Update or Fetch in flight
  Search search;
  job::Any of;

 private:
  template <class Base, class Self>
  static Base* base(Self& job) {
    return std::visit(
        [](auto& kind) -> Base* {
          if constexpr (std::is_base_of_v<Base, std::remove_reference_t<decltype(kind)>>) return &kind;
          else return nullptr;
        },
        job.of);
  }
};

template <JobKind kind, class T>
inline constexpr bool kIsKind = std::is_same_v<std::variant_alternative_t<static_cast<std::size_t>(kind), job::Any>, T>;
static_assert(kIsKind<JobKind::client_write, job::ClientWrite> &&
              kIsKind<JobKind::forwarded_update, job::ForwardedUpdate> && kIsKind<JobKind::inherited, job::Inherited> &&
              kIsKind<JobKind::sync, job::Sync> && kIsKind<JobKind::take, job::Take> &&
              kIsKind<JobKind::repair, job::Repair>);

}  // namespace ff::fs3::replica
