// The transitions of jobs: for each kind, the stage and a signal give an action and the next stage. Of the rows that
// match, the first one whose condition holds applies. A job ignores a signal without rows.
//
// An action may raise another signal at once; the comment at its name says which.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <type_traits>
#include <variant>

#include "fs3/replica/job.hpp"

namespace ff::fs3::replica {

enum class Signal : std::uint8_t {
  turn,            // the job is the chunk's first one
  check,           // the version has its number, or creations in progress may have ended
  durable,         // the job's version is durable here
  applied,         // the store's outcome of an Apply or Drop: ok
  no_space,        // the store refused: no space
  corrupt,         // the store refused: stored bytes fail their CRC
  refused,         // the store refused for another reason
  store_failed,    // the store's outcome is unknown
  acknowledged,    // the successor's answer to the Update: ok
  their_corrupt,   // the successor's answer: its base fails its CRC
  their_no_space,  // the successor's answer: no space
  unanswered,      // the Update may never be answered, or the successor's answer is another one
  unreadable,      // the contents to send fail their CRC
  retry,           // the pause is over
  contents,        // a source sent the wanted contents
  next_source,     // a source did not answer, refused, or has no such contents
  no_copy,         // the search found no intact contents
  routing,         // a new routing, or the replica stopped
  lease_ended,
};

enum class When : std::uint8_t {
  always,
  may_apply,       // no creation in progress has a version up to the removal's
  syncing,         // the target is SYNCING
  known,           // the version, or a newer one, is committed here already; or the chunk to remove is gone
  follows,         // the Update's base is the committed version, no version is pending, and it is no `forget`
  needless,        // sync: the successor has the same by now. take: nothing is missing. repair: no committed version
  takes_removal,   // take: the version is a removal
  serving,         // the target is SERVING
  head,            // the target is the head and has a lease
  has_successor,   // the target is SERVING and has a successor
  is_committed,    // the version is committed here
  can_refetch,     // fewer than kMostRefetches Applies of fetched contents have ended
  head_refetches,  // head and can_refetch
  in_parts,        // the Update is not a REPLACE
  may_drop,        // the version is pending, and the successor is not SYNCING
  is_paused,       // the job waits for a Retry of its Update
  sent_as_is,      // the job sends or fetches contents even if they fail their CRCs
  unacknowledged,  // pending, known to no client, and at no other target
};

enum class Do : std::uint8_t {
  stay,
  number,             // gives the version its number -> check
  hold,               // waits for the end of a creation; then the signal is `check`
  apply,              // Apply of a client's write, over its base
  accept,             // Apply of the predecessor's Update, over its base
  overwrite,          // Apply as the committed version, whatever version is here
  finish,             // ends the job: answers ok
  refuse,             // ends the job: answers the status of the signal
  diverge,            // ends the job: answers `diverged`; the replica stops
  cannot_follow,      // ends the job without an answer; the replica stops if the Update is of this routing
  leave,              // ends the job: clients get `stale_routing`
  advance,            // -> durable
  commit,             // Commit if the version is pending; ends the job: answers ok
  commit_everywhere,  // like commit; also removes the chunk's waiting sync jobs
  send,               // Update to the successor
  send_difference,    // Update that brings the successor's chunk to its state here
  send_whole,         // Update as REPLACE
  send_again,         // the same Update, with the same op
  send_anew,          // notes that the Update of the old role may have arrived -> durable
  pause,              // Pause before the next try of the Update
  fetch,              // Fetch from the next source; after the last one Pause, or -> no_copy
  fetch_as_is,        // Fetch of contents from `peer`, even if they are damaged
  fetch_later,        // Pause before the next Fetch
  replace,            // Apply of fetched contents
  lack,               // gives up the search -> no_copy
  drop_for_space,     // Drop; `no_space` will be the answer
  drop_damaged,       // Drop; `stale_routing` will be the answer
  dropped,            // ends the job: answers `no_space` or `stale_routing`, as set with the Drop
  send_damaged,       // Unrepairable; the next Update sends the contents although they fail their CRCs -> durable
  report_damage,      // Unrepairable; ends the job: answers `corrupt`
};

template <class E>
class Set {  // of values of an enum
 public:
  constexpr Set(E value) : bits_(1u << static_cast<unsigned>(value)) {}
  constexpr bool has(E value) const { return (bits_ >> static_cast<unsigned>(value) & 1) != 0; }
  constexpr Set operator|(Set other) const { return Set(bits_ | other.bits_); }

 private:
  constexpr explicit Set(std::uint32_t bits) : bits_(bits) {}
  std::uint32_t bits_;
};

struct Transition {
  Set<JobKind> kinds;
  Set<Stage> stages;
  Set<Signal> signals;
  When when;
  Do action;
  Stage next;
};

namespace table {

using enum JobKind;
using enum Stage;
using enum Signal;
using enum When;
using enum Do;

template <class E>
  requires std::is_enum_v<E>
constexpr Set<E> operator|(E a, E b) {
  return Set(a) | Set(b);
}

inline constexpr Set<JobKind> kWrites = client_write | forwarded_update | inherited;
inline constexpr Set<JobKind> kSent = kWrites | sync;            // kinds that send their version to the successor
inline constexpr Set<JobKind> kMending = client_write | repair;  // kinds that need the committed version intact
inline constexpr Set<JobKind> kAll = kSent | take | repair;
inline constexpr Set<Stage> kOwn = sending | fetching | replacing;  // work on the job's version; kSent: it is durable
inline constexpr Set<Stage> kDurable = kOwn | waiting | applying;
inline constexpr Set<Stage> kInStore = applying | replacing | replacing_base | dropping;  // wait for the store
inline constexpr Set<Stage> kElsewhere = waiting | held | sending | fetching | fetching_base;
inline constexpr Set<Signal> kRefused = no_space | corrupt | refused;
inline constexpr Set<Signal> kOutcome = kRefused | applied;
inline constexpr Set<Signal> kUnsettled = their_corrupt | their_no_space | unanswered;

// clang-format off
inline constexpr Transition kTransitions[] = {
    // The job's turn.
    {client_write,     waiting, turn,  always,        number,          held},
    {client_write,     held,    check, may_apply,     apply,           applying},
    {client_write,     held,    check, always,        hold,            held},
    {forwarded_update, waiting, turn,  syncing,       overwrite,       applying},
    {forwarded_update, waiting, turn,  known,         finish,          done},
    {forwarded_update, waiting, turn,  follows,       accept,          applying},
    {forwarded_update, waiting, turn,  always,        diverge,         done},
    {inherited,        waiting, turn,  always,        advance,         same},
    {sync,             waiting, turn,  needless,      finish,          done},
    {sync,             waiting, turn,  always,        send_difference, sending},
    {take,             waiting, turn,  needless,      finish,          done},
    {take,             waiting, turn,  takes_removal, overwrite,       applying},
    {take,             waiting, turn,  always,        fetch,           fetching},
    {repair,           waiting, turn,  needless,      finish,          done},
    {repair,           waiting, turn,  always,        fetch,           fetching_base},

    // The store's outcome of the version's Apply.
    {take,             applying, applied,            always,         finish,        done},
    {client_write,     applying, corrupt,            head_refetches, fetch,         fetching_base},
    {client_write,     applying, kRefused,           always,         refuse,        done},
    {forwarded_update, applying, no_space | corrupt, serving,        refuse,        done},
    {forwarded_update, applying, kRefused,           always,         cannot_follow, done},
    {take,             applying, kRefused,           always,         fetch_later,   fetching},

    // A version that is durable here: the role decides.
    {kSent, kDurable, durable | applied, has_successor, send,   sending},
    {kSent, kDurable, durable | applied, serving,       commit, done},
    {kSent, kDurable, durable | applied, is_committed,  finish, done},
    {kSent, kDurable, durable | applied, always,        leave,  done},

    // The successor's answer.
    {kWrites, sending, acknowledged,   always,    commit_everywhere, done},
    {sync,    sending, acknowledged,   always,    finish,            done},
    {kSent,   sending, their_corrupt,  in_parts,  send_whole,        sending},
    {kWrites, sending, their_no_space, may_drop,  drop_for_space,    dropping},
    {kSent,   sending, kUnsettled,     is_paused, stay,              same},
    {kSent,   sending, kUnsettled,     always,    pause,             same},
    {kSent,   sending, retry,          always,    send_again,        same},

    // Contents to send that fail their CRC.
    {kSent, sending, unreadable, is_paused,   stay,  same},
    {kSent, sending, unreadable, sent_as_is,  pause, same},
    {kSent, sending, unreadable, can_refetch, fetch, fetching},
    {kSent, sending, unreadable, always,      lack,  same},

    // The search for intact contents of the job's version.
    {kSent,        fetching,  contents,            always, replace,   replacing},
    {take,         fetching,  contents,            always, overwrite, applying},
    {kSent | take, fetching,  retry | next_source, always, fetch,     same},
    {kSent,        replacing, kRefused,            always, lack,      same},

    // The search for intact contents of the committed version. If there is no space to store them, the job is refused
    // but no damage is reported, because an intact copy exists.
    {kMending,     fetching_base,  contents,            always, replace, replacing_base},
    {kMending,     fetching_base,  retry | next_source, always, fetch,   same},
    {client_write, replacing_base, applied,             head,   apply,   applying},
    {client_write, replacing_base, applied,             always, leave,   done},
    {repair,       replacing_base, applied,             always, finish,  done},
    {kMending,     replacing_base, no_space,            always, refuse,  done},
    {kMending,     replacing_base, corrupt | refused,   always, lack,    same},

    // No intact copy.
    {kMending,                 fetching_base | replacing_base, no_copy,  always,         report_damage, done},
    {client_write | inherited, kOwn,                           no_copy,  unacknowledged, drop_damaged,  dropping},
    {kSent,                    kOwn,                           no_copy,  always,         send_damaged,  same},
    {take,                     fetching,                       no_copy,  sent_as_is,     finish,        done},
    {take,                     fetching,                       no_copy,  always,         fetch_as_is,   fetching},
    {kWrites,                  dropping,                       kOutcome, always,         dropped,       done},

    // A new role. A job that waits for the store continues; when the store has answered, the new role decides.
    {client_write, waiting | held,     routing, head,    stay,      same},
    {client_write, fetching_base,      routing, head,    fetch,     same},
    {repair,       waiting,            routing, serving, stay,      same},
    {repair,       fetching_base,      routing, serving, fetch,     same},
    {kWrites,      sending | fetching, routing, serving, send_anew, same},
    {kAll,         kElsewhere,         routing, always,  leave,     done},

    // The end of the lease, and a store that failed.
    {client_write, waiting | held | fetching_base, lease_ended,  always, leave, done},
    {kAll,         kInStore,                       store_failed, always, leave, done},
};
// clang-format on

// Stages of each kind, and signals that a job in a stage can get.
constexpr bool uses(JobKind kind, Stage stage) {
  switch (stage) {
    case waiting: return true;
    case held: return kind == client_write;
    case applying: return kind == client_write || kind == forwarded_update || kind == take;
    case sending: return kSent.has(kind);
    case fetching: return kSent.has(kind) || kind == take;
    case replacing: return kSent.has(kind);
    case fetching_base:
    case replacing_base: return kind == client_write || kind == repair;
    case dropping: return kWrites.has(kind);
    case done:
    case same: break;
  }
  return false;
}

constexpr Set<Signal> signals(Stage stage) {
  switch (stage) {
    case waiting: return turn | routing;
    case held: return check | routing;
    case sending: return kUnsettled | acknowledged | unreadable | retry | no_copy | routing;
    case fetching:
    case fetching_base: return contents | retry | next_source | no_copy | routing;
    default: return kOutcome | store_failed;
  }
}

inline constexpr std::size_t kKinds = std::variant_size_v<job::Any>, kStages = static_cast<std::size_t>(done),
                             kSignals = static_cast<std::size_t>(lease_ended) + 1, kRows = std::size(kTransitions);

constexpr bool matches(const Transition& row, JobKind kind, Stage stage, Signal signal) {
  return row.kinds.has(kind) && row.stages.has(stage) && row.signals.has(signal);
}

// First row of each (kind, stage, signal); kRows: none.
using Index = std::array<std::array<std::array<std::uint8_t, kSignals>, kStages>, kKinds>;

constexpr Index index() {
  Index first{};
  for (std::size_t k = 0; k < kKinds; ++k) {
    for (std::size_t s = 0; s < kStages; ++s) {
      for (std::size_t g = 0; g < kSignals; ++g) {
        std::size_t row = 0;
        while (row < kRows && !matches(kTransitions[row], JobKind(k), Stage(s), Signal(g))) ++row;
        first[k][s][g] = static_cast<std::uint8_t>(row);
      }
    }
  }
  return first;
}

inline constexpr Index kFirst = index();

// Returns whether the rows of (kind, stage, signal) cover every case: one of them always holds, and no row up to it
// leads to a stage that the kind lacks. Without rows, returns whether a job in this stage cannot get the signal.
constexpr bool complete(JobKind kind, Stage stage, Signal signal) {
  bool any = false;
  for (std::size_t row = kFirst[std::size_t(kind)][std::size_t(stage)][std::size_t(signal)]; row < kRows; ++row) {
    if (!matches(kTransitions[row], kind, stage, signal)) continue;
    any = true;
    const Stage next = kTransitions[row].next;
    if (next != done && next != same && !uses(kind, next)) return false;
    if (kTransitions[row].when == always) return true;
  }
  return !any && !(uses(kind, stage) && signals(stage).has(signal));
}

constexpr bool complete() {
  for (std::size_t k = 0; k < kKinds; ++k) {
    for (std::size_t s = 0; s < kStages; ++s) {
      for (std::size_t g = 0; g < kSignals; ++g) {
        if (!complete(JobKind(k), Stage(s), Signal(g))) return false;
      }
    }
  }
  return true;
}

static_assert(complete());

}  // namespace table

}  // namespace ff::fs3::replica
