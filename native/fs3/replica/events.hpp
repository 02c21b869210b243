// Inputs of a replica: events of its shell and messages of other replicas. Plain values; copying one copies no bytes.
//
// A *payload* is the shell's number for bytes (0: none). Exactly one Release action returns each payload of an event.
// An *op* is the number of a request, known to both sides. The shell's ops (ClientWrite, Read) never repeat while the
// replica exists; the replica's ops grow by one and never repeat.
#pragma once

#include <cstdint>
#include <variant>
#include <vector>

#include "fs3/types.hpp"

namespace ff::fs3::replica {

using Op = std::uint64_t;  // 0: none
using Payload = std::uint64_t;
using Incarnation = std::uint64_t;

enum class State : std::uint8_t { serving, recovering, lastsrv, syncing, waiting, offline };  // the order of members
enum class Local : std::uint8_t { online, uptodate, faulty };

struct Member {
  TargetId target = 0;
  State state = State::offline;
  Incarnation incarnation = 0;  // incarnation that was made SERVING, RECOVERING or SYNCING
};

// State of a chunk in an index or a page.
struct Entry {
  ChunkId chunk;
  Version committed = 0;  // 0: absent
  std::uint32_t length = 0;
  std::uint32_t crc = 0;
  Version pending = 0;   // 0: none
  bool removes = false;  // the pending version removes the chunk
  std::uint32_t pending_crc = 0;
};

// ---- From the shell ----------------------------------------------------------------------------------------------

// The chain as the manager published it. A routing that is not newer than the last one is ignored.
struct Routing {
  ChainVersion version = 0;
  std::vector<Member> members;  // in order
};

// runs false: the lease has ended. true: the lease runs, for the same incarnation. If the lease did not run before,
// `version` is the chain's version at the manager when the lease was granted. The target may have left the chain
// meanwhile, so it serves only once it knows that version.
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

// Outcome of an Apply, Drop or Conclude in the store, once for each. ok: durable.
struct Applied {
  Op op = 0;
  Status status = Status::ok;
  std::uint32_t length = 0;  // Apply: of the chunk afterwards
};

// The Send of `op` may stay without an answer (connection lost, timeout), or the message was never sent. `corrupt`: the
// contents to send fail their CRC; `not_found`: that version does not exist.
struct SendFailed {
  Op op = 0;
  Status status = Status::io_error;
};

struct Retry {  // the backoff of Pause{op} is over
  Op op = 0;
};

// ---- Messages between replicas: sent by a Send action, passed unchanged to the receiver's step() -------------------
// An answer (Answer, Page, Fetched, Tags) carries op and chain version of its request. In one chain version a replica
// has only one incarnation, so the chain version reveals an answer to an earlier incarnation.

// Asks the successor to make `version` of the chunk durable. `settled`: all ops below it were answered or abandoned, so
// an update whose op is below a `settled` seen before is a late duplicate.
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
  Payload payload = 0;  // replace: set by the receiving shell, which holds the contents that came with the message
  bool forget = false;  // remove: the receiver's chunk is not the chain's; no removal happened
};

// Answers an Update or SyncDone. For a PageAsk, Fetch or TagsAsk, an Answer is a refusal (never `ok`).
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

// The successor has all chunks; floor and tags (payload) make it complete. The shell sends the store's tags at the time
// when it carries out the action; tags of pending versions get version 0.
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
  bool as_is = false;  // even if they fail their CRCs
};

struct Fetched {
  Op op = 0;
  TargetId from = 0;
  ChainVersion chain_version = 0;
  ChunkId chunk;
  Version version = 0;
  Status status = Status::ok;  // or not_found; or corrupt, set by the sending shell
  Payload payload = 0;         // set by the receiving shell
  std::uint32_t crc = 0;       // of the whole contents, from the sender's index
};

// Sent to a LASTSRV member by the RECOVERING one.
struct TagsAsk {
  Op op = 0;
  TargetId from = 0;
  ChainVersion chain_version = 0;
};

struct Tags {  // the store's tags, also those of pending versions, unchanged
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
