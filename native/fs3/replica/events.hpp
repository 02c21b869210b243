// Inputs of a replica: events of its shell and messages of other replicas. Plain values; copying one copies no bytes.
//
// A *payload* is the shell's number for bytes (0: none). Exactly one Release action returns each payload of an event.
// An *op* is the number of a request: the requester chooses it, and the answer carries it. The shell's ops
// (ClientWrite, Read) never repeat while the replica exists; the replica's ops grow by one and never repeat.
#pragma once

#include <cstdint>
#include <variant>
#include <vector>

#include "fs3/types.hpp"

namespace ff::fs3::replica {

using Op = std::uint64_t;  // 0: none
using Payload = std::uint64_t;
using Incarnation = std::uint64_t;

// State of a member in a chain. The members of a chain are in the order of these values.
enum class State : std::uint8_t { serving, recovering, lastsrv, syncing, waiting, offline };
enum class Local : std::uint8_t { online, uptodate, faulty };

struct Member {
  TargetId target = 0;
  State state = State::offline;
  Incarnation incarnation = 0;  // incarnation that was made SERVING, RECOVERING or SYNCING
};

// State of a chunk in an index or a page.
struct Entry {
  ChunkId chunk;
  Version committed = 0;          // 0: absent
  std::uint32_t length = 0;       // of the committed contents
  std::uint32_t crc = 0;          // of the committed contents
  Version pending = 0;            // 0: none
  bool removes = false;           // the pending version removes the chunk
  std::uint32_t pending_crc = 0;  // of the pending contents
};

// ---- From the shell ----------------------------------------------------------------------------------------------

// The chain as the manager published it. A routing that is not newer than the last one is ignored.
struct Routing {
  ChainVersion version = 0;
  std::vector<Member> members;  // in order
};

// `runs` false: the lease has ended. `runs` true: this incarnation holds the lease. If the lease did not run before,
// `version` is the chain's version at the manager when the lease was granted. The replica may know an older chain that
// still contains the target, so it serves only once its chain has at least that version.
struct Lease {
  bool runs = false;
  ChainVersion version = 0;
};

struct ClientWrite {
  Op op = 0;
  ChainVersion chain_version = 0;
  ChunkId chunk;
  Kind kind = Kind::write;  // write, truncate, extend, remove
  std::uint32_t offset = 0;
  std::uint32_t length = 0;
  Tag tag;
  Payload payload = 0;
};

struct Read {
  Op op = 0;
  ChainVersion chain_version = 0;
  ChunkId chunk;
  bool allow_uncommitted = false;
};

// The stored bytes of the chunk's committed version fail their CRC. The scrub or a client found the damage, and the
// shell confirmed it.
struct Damaged {
  ChunkId chunk;
};

// Outcome of an Apply, Drop or Conclude in the store; each gets exactly one Applied. Status ok: the change is durable.
struct Applied {
  Op op = 0;
  Status status = Status::ok;
  std::uint32_t length = 0;  // of an Apply: length of the chunk in the new version
};

// The Send of `op` may never be answered (connection lost, timeout), or the message was never sent. `corrupt`: the
// contents to send fail their CRC; `not_found`: that version does not exist.
struct SendFailed {
  Op op = 0;
  Status status = Status::io_error;
};

struct Retry {  // the backoff of Pause{op} is over
  Op op = 0;
};

// ---- Messages between replicas: sent by a Send action, passed unchanged to the receiver's step() -------------------
// An answer (Answer, Page, Fetched, Tags) carries the op and chain version of its request. In one chain version a
// replica has only one incarnation, so the chain version reveals an answer to an earlier incarnation.

// Asks the successor to make `version` of the chunk durable. `settled`: every Update with a lower op was answered or
// abandoned. So the receiver ignores an Update whose op is below the largest `settled` that it has seen: that Update is
// a late duplicate.
struct Update {
  Op op = 0;
  Op settled = 0;
  TargetId from = 0;
  ChainVersion chain_version = 0;
  ChunkId chunk;
  Version base = 0;
  Version version = 0;
  Kind kind = Kind::write;
  std::uint32_t offset = 0;
  std::uint32_t length = 0;
  Tag tag;
  Payload payload = 0;  // replace: set by the receiver's shell, which holds the contents that came with the message
  bool forget = false;  // remove: the chain has no such chunk; the removal is not a client's write
};

// Answers an Update or SyncDone. For a PageAsk, Fetch or TagsAsk, an Answer refuses the request (never `ok`).
struct Answer {
  Op op = 0;
  TargetId from = 0;
  ChainVersion chain_version = 0;
  Status status = Status::ok;
};

struct PageAsk {  // asks for entries after `after` (inode 0 comes before all chunks)
  Op op = 0;
  TargetId from = 0;
  ChainVersion chain_version = 0;
  ChunkId after;
};

struct Page {
  Op op = 0;
  TargetId from = 0;
  ChainVersion chain_version = 0;
  std::vector<Entry> entries;  // in order
  bool more = false;           // entries follow the last one
  Version floor = 0;
};

// Tells the SYNCING successor that it has all chunks. The successor becomes complete with `floor` and the tags in
// `payload`. These are the tags of the sender's store when its shell carries out the Send; tags of pending versions get
// version 0.
struct SyncDone {
  Op op = 0;
  TargetId from = 0;
  ChainVersion chain_version = 0;
  Version floor = 0;
  Payload payload = 0;
};

struct Fetch {  // asks for the whole contents of that version, committed or pending
  Op op = 0;
  TargetId from = 0;
  ChainVersion chain_version = 0;
  ChunkId chunk;
  Version version = 0;
  bool as_is = false;  // send the contents even if they fail their CRCs
};

struct Fetched {
  Op op = 0;
  TargetId from = 0;
  ChainVersion chain_version = 0;
  ChunkId chunk;
  Version version = 0;
  Status status = Status::ok;  // ok, not_found, or corrupt (set by the sender's shell)
  Payload payload = 0;         // set by the receiver's shell
  std::uint32_t crc = 0;       // of the whole contents, from the sender's index
};

// Asks a LASTSRV member for its tags and floor; sent by the RECOVERING member.
struct TagsAsk {
  Op op = 0;
  TargetId from = 0;
  ChainVersion chain_version = 0;
};

struct Tags {  // answers a TagsAsk: floor and all tags of the store; tags of pending versions keep their version
  Op op = 0;
  TargetId from = 0;
  ChainVersion chain_version = 0;
  Version floor = 0;
  Payload payload = 0;
};

using Message = std::variant<Update, Answer, PageAsk, Page, SyncDone, Fetch, Fetched, TagsAsk, Tags>;
using Event = std::variant<Routing, Lease, ClientWrite, Read, Damaged, Applied, SendFailed, Retry, Update, Answer,
                           PageAsk, Page, SyncDone, Fetch, Fetched, TagsAsk, Tags>;

}  // namespace ff::fs3::replica
