// What a replica asks of its shell. The actions of a step are carried out in the order given, before the next step;
// "carried out" of Apply, Commit, Drop, Mark and Conclude means: given to the store in this order.
#pragma once

#include <cstdint>
#include <variant>
#include <vector>

#include "fs3/replica/events.hpp"

namespace ff::fs3::replica {

// To the store; Applied{op} follows when it is durable, or when it is refused and nothing changed. io_error also says
// that what became of it is unknown: the store must be opened anew.
// kind replace: sets contents and version whatever was there, with the block CRCs that came with the bytes, as they are.
// Committed, it takes the place of both versions; else that of the pending one. any_base: `base` is not to be looked at
// and a pending version is given up (replace has it always; so has a removal that is not a client's).
struct Apply {
  Op op = 0;
  ChunkId chunk;
  Version base = 0;  // the committed version that it follows
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

struct Commit {  // the pending version, at once; needs no sync of its own
  ChunkId chunk;
  Version version = 0;
};

// Gives the pending version up and sets the version of its tag to 0 (its client may send the write again). Applied{op}
// when that is durable.
struct Drop {
  Op op = 0;
  ChunkId chunk;
  Version version = 0;
};

// The store is no whole replica any more: durable word "not complete", all tags forgotten. Not waited for: whatever is
// applied later is durable after it.
struct Mark {};

// The store is a whole replica: floor raised, the tags of the payload kept (of a channel the larger seq; of equal ones
// the larger version), damage of the log forgiven, durable word "complete"; then Applied{op}.
struct Conclude {
  Op op = 0;
  Version floor = 0;
  Payload payload = 0;  // 0: no tags
};

// Carries the message to the target. The bytes that go along:
// Update of kind write: those of its payload; of kind replace, and Fetched that is ok: the whole contents and stored
// block CRCs of (chunk, version), committed or pending, as the store has them when the action is carried out; SyncDone
// and Tags: the store's tags. Unless `as_is`, contents are compared with their CRCs first: a mismatch becomes
// SendFailed{op, corrupt} of an Update and Fetched{status = corrupt}.
// One that is never answered (Update, PageAsk, SyncDone, Fetch, TagsAsk) is reported by SendFailed.
struct Send {
  TargetId to = 0;
  Message message;
  bool as_is = false;
};

struct Reply {  // to a ClientWrite, or to a Read that gets no bytes; once for each op
  Op op = 0;
  Status status = Status::ok;
  Version version = 0;
  std::uint32_t length = 0;  // of the chunk, as it is now
};

// To a Read: the bytes of that version. The shell takes hold of them while it carries the action out; they may go out
// later, also after the lease.
struct ServeRead {
  Op op = 0;
  ChunkId chunk;
  Version version = 0;
};

struct Pause {  // give Retry{op} after a while (growing from op to op as the shell sees fit)
  Op op = 0;
};

// What the target says of itself in heartbeats from now on: (its incarnation, state, version). At first: ONLINE, 0.
struct LocalState {
  Local state = Local::online;
  ChainVersion version = 0;
};

struct Release {  // the replica is done with it
  Payload payload = 0;
};

struct Unrepairable {  // no replica has these bytes whole; readers see CRCs that do not hold, until they are overwritten
  ChunkId chunk;
  Version version = 0;
};

using Action = std::variant<Apply, Commit, Drop, Mark, Conclude, Send, Reply, ServeRead, Pause, LocalState, Release,
                            Unrepairable>;
using Actions = std::vector<Action>;

}  // namespace ff::fs3::replica
