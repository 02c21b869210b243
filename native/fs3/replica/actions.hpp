// Requests of a replica to its shell, the code around the state machine that has the store, the network and the clock.
// The shell carries out the actions of a step in the order given, before the next step. An Apply, Commit, Drop, Mark or
// Conclude is carried out once it has been given to the store.
#pragma once

#include <cstdint>
#include <variant>
#include <vector>

#include "fs3/replica/events.hpp"

namespace ff::fs3::replica {

// Gives a change to the store. Applied{op} follows when the change is durable, or when it is refused and nothing
// changed. io_error also means that the outcome is unknown: the store must be reopened.
// kind replace: sets contents and version over any former state, and keeps the block CRCs that came with the bytes.
// With `committed`, a replace replaces the committed and the pending version, else only the pending version.
// any_base: ignore `base` and drop a pending version (set for every replace, and for the removals at a SYNCING or
// RECOVERING target).
struct Apply {
  Op op = 0;
  ChunkId chunk;
  Version base = 0;  // the committed version on which the change builds
  Version version = 0;
  ChainVersion chain_version = 0;
  Kind kind = Kind::write;
  bool committed = false;  // becomes the committed version in the same record; else pending
  bool any_base = false;
  std::uint32_t offset = 0;
  std::uint32_t length = 0;
  Tag tag;
  Payload payload = 0;
};

// Makes the pending version the committed one, visible at once and durable with the store's next sync. No Applied
// follows.
struct Commit {
  ChunkId chunk;
  Version version = 0;
};

// Drops the pending version. Its tag stays with version 0, so that the client can retry the write. Applied{op} follows
// when the drop is durable.
struct Drop {
  Op op = 0;
  ChunkId chunk;
  Version version = 0;
};

// Marks the store as incomplete: sets the durable word "not complete" and forgets all tags. The replica does not wait
// for the mark, because any later Apply becomes durable after the mark.
struct Mark {};

// Makes the store a complete replica; then Applied{op} follows. Raises the floor and stores the payload's tags. Of two
// tags of a channel, the tag with the larger seq stays, or with the larger version if the seqs are equal. Clears damage
// of the log, and sets the durable word "complete".
struct Conclude {
  Op op = 0;
  Version floor = 0;
  Payload payload = 0;  // 0: no tags
};

// Sends the message to the target, together with bytes:
// - Update of kind write: the bytes of its payload;
// - Update of kind replace, and Fetched with status ok: the whole contents and stored block CRCs of (chunk, version),
//   committed or pending, as the store has them when the action is carried out;
// - SyncDone and Tags: the store's tags.
// Unless `as_is`, contents are compared with their CRCs first. A mismatch becomes SendFailed{op, corrupt} for an
// Update, and Fetched{status = corrupt} for a Fetched.
// SendFailed reports a request that may never be answered (Update, PageAsk, SyncDone, Fetch, TagsAsk).
struct Send {
  TargetId to = 0;
  Message message;
  bool as_is = false;
};

struct Reply {  // answers a ClientWrite, or a Read that gets no bytes; once for each op
  Op op = 0;
  Status status = Status::ok;
  Version version = 0;
  std::uint32_t length = 0;  // status ok: current length of the chunk
};

// Answers a Read with the bytes of that version. The shell holds the bytes from this action on. It may send them later,
// also after the lease has ended.
struct ServeRead {
  Op op = 0;
  ChunkId chunk;
  Version version = 0;
};

struct Pause {  // asks for Retry{op} after a backoff; the shell chooses its length, and may increase it with each pause
  Op op = 0;
};

// Sets the state and version that the target reports in heartbeats, with its incarnation. Before the first LocalState
// the target reports version 0 and ONLINE, or FAULTY if the store is incomplete.
struct LocalState {
  Local state = Local::online;
  ChainVersion version = 0;
};

struct Release {  // the replica no longer needs the payload
  Payload payload = 0;
};

// No replica has these bytes intact. Readers get CRCs that do not match, until the bytes are overwritten.
struct Unrepairable {
  ChunkId chunk;
  Version version = 0;
};

using Action =
    std::variant<Apply, Commit, Drop, Mark, Conclude, Send, Reply, ServeRead, Pause, LocalState, Release, Unrepairable>;
using Actions = std::vector<Action>;

}  // namespace ff::fs3::replica
