// Requests of a replica to its shell. The shell carries out the actions of a step in the order given, before the next
// step. "Carried out" of Apply, Commit, Drop, Mark and Conclude means: given to the store in this order.
#pragma once

#include <cstdint>
#include <variant>
#include <vector>

#include "fs3/replica/events.hpp"

namespace ff::fs3::replica {

// To the store; Applied{op} follows when the change is durable, or when it is refused and nothing changed. io_error
// also means that the outcome is unknown: the store must be reopened.
// kind replace: sets contents and version over any former state, and keeps the block CRCs that came with the bytes. If
// committed it replaces both versions, else the pending one. any_base: ignore `base` and drop a pending version
// (replace always has it; so has a removal that is not a client's).
struct Apply {
  Op op = 0;
  ChunkId chunk;
  Version base = 0;  // the committed version that it builds on
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

struct Commit {  // makes the pending version the committed one, at once; needs no sync of its own
  ChunkId chunk;
  Version version = 0;
};

// Drops the pending version and sets the version of its tag to 0 (its client may retry the write). Applied{op} follows
// when the drop is durable.
struct Drop {
  Op op = 0;
  ChunkId chunk;
  Version version = 0;
};

// Marks the store as no complete replica: durable word "not complete", all tags forgotten. The replica does not wait
// for it, because any later Apply becomes durable after it.
struct Mark {};

// Makes the store a complete replica, then Applied{op}: raises the floor, keeps the payload's tags (of a channel the
// larger seq; of equal ones the larger version), forgives damage of the log, sets the durable word "complete".
struct Conclude {
  Op op = 0;
  Version floor = 0;
  Payload payload = 0;  // 0: no tags
};

// Sends the message to the target, together with these bytes:
// Update of kind write: those of its payload; of kind replace, and Fetched that is ok: the whole contents and stored
// block CRCs of (chunk, version), committed or pending, as the store has them when the action is carried out; SyncDone
// and Tags: the store's tags. Unless `as_is`, contents are compared with their CRCs first: a mismatch becomes
// SendFailed{op, corrupt} of an Update and Fetched{status = corrupt}.
// SendFailed reports a message that is never answered (Update, PageAsk, SyncDone, Fetch, TagsAsk).
struct Send {
  TargetId to = 0;
  Message message;
  bool as_is = false;
};

struct Reply {  // to a ClientWrite, or to a Read that gets no bytes; once for each op
  Op op = 0;
  Status status = Status::ok;
  Version version = 0;
  std::uint32_t length = 0;  // of the chunk, as of now
};

// To a Read: the bytes of that version. The shell holds them from this action on, and may send them later, also after
// the lease.
struct ServeRead {
  Op op = 0;
  ChunkId chunk;
  Version version = 0;
};

struct Pause {  // give Retry{op} after a backoff (the shell may let it grow from op to op)
  Op op = 0;
};

// The target's report in heartbeats from now on: (its incarnation, state, version). Initially: ONLINE, 0.
struct LocalState {
  Local state = Local::online;
  ChainVersion version = 0;
};

struct Release {  // the replica is done with it
  Payload payload = 0;
};

struct Unrepairable {  // no replica has these bytes intact; readers see CRCs that do not match, until the bytes are overwritten
  ChunkId chunk;
  Version version = 0;
};

using Action = std::variant<Apply, Commit, Drop, Mark, Conclude, Send, Reply, ServeRead, Pause, LocalState, Release,
                            Unrepairable>;
using Actions = std::vector<Action>;

}  // namespace ff::fs3::replica
