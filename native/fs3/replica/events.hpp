// Inputs of a replica: events of its shell and messages of other replicas. Plain values; copying one copies no bytes.
//
// A *payload* is the shell's number for bytes (0: none). Exactly one Release action gives back each payload of an
// event. An *op* is the number of a request that both its sides know. The shell's ops (ClientWrite, Read) never repeat
// while the replica lives; the replica's ops grow by one and never repeat.
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
  Incarnation incarnation = 0;  // for which it was made SERVING, RECOVERING or SYNCING
};

// State of a chunk in an index or a page.
struct Entry {
  ChunkId chunk;
  Version committed = 0;  // 0: absent
  std::uint32_t length = 0;
  std::uint32_t crc = 0;
  Version pending = 0;  // 0: none
  bool removes = false;  // the pending version removes the chunk
  std::uint32_t pending_crc = 0;
};

// ---- From the shell ----------------------------------------------------------------------------------------------

// The chain as the manager published it. A routing that is not newer than the last one is ignored.
struct Routing {
  ChainVersion version = 0;
  std::vector<Member> members;  // in order
};

// False: the lease ended. True: it runs, with the same incarnation. If it did not run before, `version` is the chain's
// at the manager when the lease was granted. The target may have left the chain meanwhile, so it serves only once it
// knows that version.
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

// The stored bytes of the chunk's committed version fail their CRC. The scrub or a client found it, and the shell
// confirmed it.
struct Damaged {
  ChunkId chunk;
};

// The store's outcome of an Apply, Drop or Conclude, once for each. ok: durable.
struct Applied {
  Op op = 0;
  Status status = Status::ok;
  std::uint32_t length = 0;  // Apply: of the chunk afterwards
};

// No answer to the Send of `op` may come any more (connection lost, timeout), or it was never sent. `corrupt`: the
// contents that it needs fail their CRC; `not_found`: that version does not exist.
struct SendFailed {
  Op op = 0;
  Status status = Status::io_error;
};

struct Retry {  // the pause of Pause{op} is over
  Op op = 0;
};

// ---- Messages from one replica to another: sent by a Send action, given to the other's step() as they are -----------
// An answer (Answer, Page, Fetched, Tags) carries op and chain version of its request. A replica works in a chain
// version in one incarnation only, so the chain version reveals an answer to an earlier incarnation.

// The sender wants `version` of the chunk to be durable at its successor. `settled`: all ops below it were answered or
// given up, so an update with a lower op than a `settled` seen before is a late duplicate.
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

// Answers an Update or SyncDone; or refuses (never `ok`) a PageAsk, Fetch or TagsAsk.
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

// The target has all that it lacked; floor and tags (payload) complete it. The shell sends the store's tags as they are
// when it carries the action out, tags of pending versions with version 0.
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
using Event = std::variant<Routing, Lease, ClientWrite, Read, Damaged, Applied, SendFailed, Retry, Update, Answer, PageAsk,
                           Page, SyncDone, Fetch, Fetched, TagsAsk, Tags>;

}  // namespace ff::fs3::replica
