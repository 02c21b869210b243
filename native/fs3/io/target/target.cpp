#include "fs3/io/target/target.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "base/crc/crc32c.hpp"
#include "base/error.hpp"

namespace ff::fs3::io {
namespace {

using replica::Op;

constexpr std::size_t kIncomplete = 0;  // index of the state word that is not 0 while the store is incomplete
constexpr auto kFullPause = std::chrono::milliseconds(50);  // delay of the next sync while the log is full
constexpr std::size_t kAside = std::size_t{256} << 10;      // another thread writes payloads of at least this size
constexpr auto kIdleSync = std::chrono::milliseconds(500);  // delay of the sync if no caller waits for the changes

// Returns CRCs of which none matches, for unreadable bytes.
std::vector<std::uint32_t> wrong_crcs(std::span<const std::byte> bytes) {
  std::vector<std::uint32_t> crcs;
  for (std::size_t from = 0; from < bytes.size(); from += kBlock)
    crcs.push_back(~crc32c(0, bytes.data() + from, std::min(kBlock, bytes.size() - from)));
  return crcs;
}

// Returns whether the status means damage; unreadable bytes count as damaged.
bool fails(Status status) { return status == Status::corrupt || status == Status::io_error; }

}  // namespace

// ---- Life --------------------------------------------------------------------------------------------------------

Target::Target(std::shared_ptr<store::Disk> disk, store::Store store, TargetId target, std::uint32_t chain,
               replica::Incarnation incarnation, std::shared_ptr<MessageSender> sender)
    : disk_(std::move(disk)),
      id_(target),
      chain_(chain),
      store_(std::move(store)),
      lookup_(store_),
      sender_(std::move(sender)),
      replica_(target, incarnation, lookup_) {}

Target::~Target() { stop(); }

void Target::start() {
  syncer_ = std::thread([this] { sync_always(); });
}

void Target::stop() {
  Work work;
  {
    std::lock_guard lock(mutex_);
    if (!std::exchange(stopping_, true)) {
      lease_until_ = {};
      for (auto& [op, asking] : asking_) {
        if (asking.wrote) {
          work.calls.push_back([wrote = std::move(asking.wrote)] { wrote(Status::stale_routing, 0, 0); });
        } else {
          answer_read(std::move(asking), {Status::stale_routing, 0}, work);
        }
      }
      asking_.clear();
    }
    queued_.notify_all();
  }
  do_work(work);
  if (syncer_.joinable()) syncer_.join();
}

Target::Report Target::report() const {
  std::lock_guard lock(mutex_);
  return {replica_.local(), replica_.chain_version(), replica_.role(), store_.failed() || refused_,
          replica_.busy_chunks()};
}

// ---- Events ------------------------------------------------------------------------------------------------------

template <class E>
void Target::step_locked(const E& event, Work& work) {
  const std::size_t from = actions_.size();  // the actions of this step follow
  replica_.step(event, actions_);
  for (std::size_t n = from; n < actions_.size(); ++n) carry_out(actions_[n], work);
  actions_.resize(from);
  role_ = replica_.role() != replica::State::serving ? Role::none : replica_.heads() ? Role::head : Role::serving;
}

template <class E>
void Target::step(const E& event) {
  Work work;
  {
    std::lock_guard lock(mutex_);
    if (ignores_events()) return;
    check_lease(work);
    step_locked(event, work);
  }
  do_work(work);
}

void Target::check_lease(Work& work) {
  const bool runs = Clock::now() < lease_until_;
  if (runs == lease_runs_) return;
  lease_runs_ = runs;
  step_locked(replica::Lease{runs, lease_version_}, work);
}

// Writing a large payload takes about as long as receiving it. Another thread writes it while this thread receives.
void Target::do_work(Work& work) {
  for (auto& [apply, content] : work.applies) {
    if (content.bytes.size() < kAside) give(apply, content);
    else sender_->aside([self = shared_from_this(), apply, content] { self->give(apply, content); });
  }
  for (const auto& call : work.calls) call();
}

void Target::give(const replica::Apply& apply, const Content& content) {
  store::Apply to;
  to.chunk = apply.chunk;
  to.base = apply.any_base ? store::kAnyBase : apply.base;
  to.version = apply.version;
  to.chain_version = apply.chain_version;
  to.kind = apply.kind;
  to.committed = apply.committed;
  to.offset = apply.offset;
  to.length = apply.length;
  to.bytes = content.bytes;
  to.crcs = content.crcs;
  to.tag = apply.tag;
  const Status status = store_.apply(apply.op, to);
  if (status != Status::ok) {
    step(replica::Applied{apply.op, status, 0});
    return;
  }
  std::lock_guard lock(mutex_);
  ++applied_;
  queued_.notify_all();
}

std::size_t Target::read(std::span<const Numbered> reads, std::span<store::Reading> readings, const Later& later) {
  std::array<std::optional<Served>, kMostEntries> served;
  decide(reads, later, std::span(served).first(reads.size()));
  std::array<store::ReadAsk, kMostEntries> asks;
  std::size_t asked = 0, answered = 0;
  for (std::size_t n = 0; n < reads.size(); ++n) {
    if (!served[n]) continue;
    const ReadEntry& entry = reads[n].entry;
    store::Reading& to = readings[reads[n].number];
    if (served[n]->status == Status::ok && served[n]->version == 0) {
      asks[asked++] = {{entry.inode, entry.index}, 0, entry.offset, entry.length, &to};
      ++answered;
    } else if (resolve(reads[n], *served[n], later, to)) {
      ++answered;
    }
  }
  store_.read(std::span(asks).first(asked));
  if (asked != 0) confirm(reads, served, readings);
  return answered;
}

// A read without the lock is valid only if the target still serves at the read's chain version. In that case all
// targets of the chain have every version that became visible during the read.
void Target::confirm(std::span<const Numbered> reads, std::span<const std::optional<Served>> served,
                     std::span<store::Reading> readings) {
  Work work;
  {
    std::lock_guard lock(mutex_);
    if (!ignores_events()) check_lease(work);
    for (std::size_t n = 0; n < reads.size(); ++n) {
      if (!served[n] || served[n]->status != Status::ok || served[n]->version != 0) continue;
      const ReadEntry& entry = reads[n].entry;
      const auto outcome = replica_.read_outcome({entry.inode, entry.index}, entry.chain_version);
      if (!ignores_events() && outcome != replica::Replica::ReadOutcome::refuse) continue;
      store::Reading& reading = readings[reads[n].number];
      reading = {};
      reading.status = Status::stale_routing;
    }
  }
  do_work(work);
}

// Decides the result of each read, or none if it is parked. Only reads that find their chunk busy take a step.
void Target::decide(std::span<const Numbered> reads, const Later& later, std::span<std::optional<Served>> served) {
  Work work;
  {
    std::lock_guard lock(mutex_);
    if (ignores_events()) {
      std::fill(served.begin(), served.end(), Served{Status::stale_routing, 0});
      return;
    }
    check_lease(work);
    const Op first = next_op_;
    next_op_ += reads.size();
    direct_op_ = first;
    direct_ = served;
    for (std::size_t n = 0; n < reads.size(); ++n) {
      const ReadEntry& entry = reads[n].entry;
      const ChunkId chunk{entry.inode, entry.index};
      switch (replica_.read_outcome(chunk, entry.chain_version)) {
        case replica::Replica::ReadOutcome::serve: served[n] = Served{}; break;
        case replica::Replica::ReadOutcome::refuse: served[n] = Served{Status::stale_routing, 0}; break;
        case replica::Replica::ReadOutcome::step:
          step_locked(replica::Read{first + n, entry.chain_version, chunk, entry.uncommitted != 0}, work);
      }
    }
    direct_ = {};
    for (std::size_t n = 0; n < reads.size(); ++n) {
      if (!served[n]) asking_.emplace(first + n, Asking{{}, later, reads[n]});
    }
  }
  do_work(work);
}

// REQUIRES: mutex_. Returns false if `op` is not one of the reads that `decide` is handling.
bool Target::keep_direct(Op op, Served served) {
  if (op - direct_op_ >= direct_.size()) return false;
  direct_[op - direct_op_] = served;
  return true;
}

// Returns false if the read is parked again.
bool Target::resolve(const Numbered& read, Served served, const Later& later, store::Reading& to) {
  for (;;) {
    if (served.status != Status::ok) {
      to = {};
      to.status = served.status;
      to.version = served.version;
      return true;
    }
    auto reading = read_version(read.entry, served.version);
    if (reading) {
      to = std::move(*reading);
      return true;
    }
    std::optional<Served> now;  // asks again, because the chunk's state has changed
    decide({&read, 1}, later, {&now, 1});
    if (!now) return false;
    served = *now;
  }
}

void Target::write(const WriteEntry& entry, Content content, Wrote wrote) {
  Work work;
  {
    std::lock_guard lock(mutex_);
    if (ignores_events()) {
      work.calls.push_back([&wrote] { wrote(Status::stale_routing, 0, 0); });
    } else {
      check_lease(work);
      const Op op = next_op_++;
      asking_.emplace(op, Asking{std::move(wrote), {}, {}});
      replica::ClientWrite event;
      event.op = op;
      event.chain_version = entry.chain_version;
      event.chunk = {entry.inode, entry.index};
      event.kind = entry.kind;
      event.offset = entry.offset;
      event.length = entry.length;
      event.tag = {entry.client, entry.channel, entry.seq};
      event.payload = entry.kind == Kind::write ? keep(std::move(content)) : 0;
      step_locked(event, work);
    }
  }
  do_work(work);
}

void Target::receive(replica::Message message, Content content) {
  Work work;
  {
    std::lock_guard lock(mutex_);
    if (ignores_events()) return;
    check_lease(work);
    std::visit(
        [&]<class T>(T& m) {
          if constexpr (requires { m.payload; }) m.payload = content.holder ? keep(std::move(content)) : 0;
          step_locked(m, work);
        },
        message);
  }
  do_work(work);
}

void Target::failed(Op op) { step(replica::SendFailed{op, Status::io_error}); }

void Target::retry(Op op) { step(replica::Retry{op}); }

void Target::routing(const replica::Routing& routing) {
  {
    std::lock_guard lock(mutex_);
    const auto self = std::find_if(routing.members.begin(), routing.members.end(),
                                   [this](const replica::Member& member) { return member.target == id_; });
    hop_ = static_cast<std::size_t>(self - routing.members.begin()) + 1;
  }
  step(routing);
}

void Target::lease(Clock::time_point until, ChainVersion version) {
  Work work;
  {
    std::lock_guard lock(mutex_);
    if (ignores_events()) return;
    lease_until_ = std::max(lease_until_, until);
    lease_version_ = std::max(lease_version_, version);
    check_lease(work);
  }
  do_work(work);
}

void Target::last(const QueryEntry& entry, QueryAnswer& answer) {
  std::lock_guard lock(mutex_);
  answer.status = Status::stale_routing;
  if (ignores_events() || Clock::now() >= lease_until_ || replica_.role() != replica::State::serving ||
      replica_.chain_version() != entry.chain_version) {
    return;
  }
  const auto found = store_.last({entry.inode, entry.upto}, entry.stride);
  answer.status = found ? Status::ok : Status::not_found;
  if (found) answer = {found->chunk.index, found->length, found->run, Status::ok, {}};
}

void Target::suspect(ChunkId chunk) {
  ++checked_;
  const bool bad = fails(store_.check(chunk));
  {
    std::lock_guard lock(mutex_);
    if (!bad) {
      damage_.whole(chunk);
      return;
    }
    if (damage_.found(chunk)) ++damaged_;
  }
  step(replica::Damaged{chunk});
}

// Called when a reader got this status instead of bytes.
void Target::on_failed_read(ChunkId chunk, Status status) {
  if (!fails(status)) return;
  {
    std::lock_guard lock(mutex_);
    if (damage_.holds(chunk)) return;
  }
  sender_->aside([self = shared_from_this(), chunk] { self->suspect(chunk); });
}

// Called by the syncer.
void Target::recheck_damaged() {
  std::vector<ChunkId> chunks;
  {
    std::lock_guard lock(mutex_);
    if (ignores_events() || rechecking_ || role_ == Role::none) return;
    chunks = damage_.due();
    if (chunks.empty()) return;
    rechecking_ = true;
  }
  sender_->aside([self = shared_from_this(), chunks = std::move(chunks)] {
    for (const ChunkId chunk : chunks) self->suspect(chunk);
    std::lock_guard lock(self->mutex_);
    self->rechecking_ = false;
  });
}

Damage::Findings Target::findings() {
  std::lock_guard lock(mutex_);
  return damage_.findings();
}

Target::Counts Target::counts() const {
  std::lock_guard lock(mutex_);
  return {groups_, made_durable_, checked_, damaged_, damage_.size(), syncing_.read()};
}

// ---- Actions -----------------------------------------------------------------------------------------------------

void Target::carry_out(const replica::Action& action, Work& work) {
  std::visit(
      [&]<class T>(const T& a) {
        if constexpr (std::is_same_v<T, replica::Apply>) {
          const auto content = contents_.find(a.payload);
          work.applies.emplace_back(a, content == contents_.end() ? Content{} : content->second);
        } else if constexpr (std::is_same_v<T, replica::Commit>) {
          accepted(store_.commit(a.chunk, a.version), work);
          dirty_ = true;
        } else if constexpr (std::is_same_v<T, replica::Drop>) {
          accepted(store_.drop(a.chunk, a.version), work);
          ride(a.op);
        } else if constexpr (std::is_same_v<T, replica::Mark> || std::is_same_v<T, replica::Conclude>) {
          carry_out(a);
        } else if constexpr (std::is_same_v<T, replica::Send> || std::is_same_v<T, replica::Reply> ||
                             std::is_same_v<T, replica::ServeRead>) {
          carry_out(a, work);
        } else if constexpr (std::is_same_v<T, replica::Pause>) {
          sender_->pause(weak_from_this(), a.op);
        } else if constexpr (std::is_same_v<T, replica::Release>) {
          contents_.erase(a.payload);
        } else if constexpr (std::is_same_v<T, replica::LocalState>) {
          if (changed_) work.calls.push_back(changed_);
        } else {
          static_assert(std::is_same_v<T, replica::Unrepairable>);  // nothing to do: readers report the damage
        }
      },
      action);
}

// Called after a Commit or Drop. If the store refused it, the replica's view of the store is wrong. The target then
// ignores all events and requests.
void Target::accepted(Status status, Work& work) {
  if (status == Status::ok || std::exchange(refused_, true)) return;
  if (changed_) work.calls.push_back(changed_);
  queued_.notify_all();
}

// A Mark first logs that the store is incomplete; its Conclude logs last that the store is complete. So a crash in
// between leaves an incomplete store, which is resynced from scratch.
void Target::carry_out(const replica::Mark&) {
  auto words = store_.state();
  words[kIncomplete] = 1;
  store_.keep_state(words);
  std::uint64_t last = 0;
  for (const auto& tagged : store_.tags()) {  // in order
    if (std::exchange(last, tagged.tag.client) != tagged.tag.client) store_.forget_client(tagged.tag.client);
  }
  dirty_ = true;
}

void Target::carry_out(const replica::Conclude& conclude) {
  store_.raise_floor(conclude.floor);
  const auto content = contents_.find(conclude.payload);
  if (content != contents_.end()) {
    for (const auto& tagged : decode_tags(content->second.bytes).value_or(std::vector<store::Tagged>{}))
      store_.keep_tag(tagged);
  }
  store_.clear_damage();
  auto words = store_.state();
  words[kIncomplete] = 0;
  store_.keep_state(words);
  ride(conclude.op);
}

void Target::ride(Op op) {
  riding_.push_back(op);
  queued_.notify_all();
}

void Target::carry_out(const replica::Send& send, Work& work) {
  Posted posted{send.to, send.message, {}};
  Content content;
  Status status = Status::ok;
  if (auto* update = std::get_if<replica::Update>(&posted.message)) {
    if (update->kind == Kind::write) {
      content = contents_.at(update->payload);
    } else if (update->kind == Kind::replace) {
      content = contents_of(update->chunk, update->version, send.as_is, status);
    }
    if (status != Status::ok) {
      const replica::SendFailed failed{update->op, status};
      work.calls.push_back([self = shared_from_this(), failed] { self->step(failed); });
      return;
    }
  } else if (auto* fetched = std::get_if<replica::Fetched>(&posted.message)) {
    if (fetched->status == Status::ok)
      content = contents_of(fetched->chunk, fetched->version, send.as_is, fetched->status);
  } else if (std::holds_alternative<replica::SyncDone>(posted.message) ||
             std::holds_alternative<replica::Tags>(posted.message)) {
    const bool done = std::holds_alternative<replica::SyncDone>(posted.message);
    auto bytes = std::make_shared<std::vector<std::byte>>(tags_of(done));
    content.bytes = *bytes;
    content.holder = std::move(bytes);
  }
  posted.crcs = content.crcs;
  content.hop = static_cast<std::uint8_t>(hop_);
  sender_->post(weak_from_this(), std::move(posted), std::move(content));
}

// Tags of the store. `settled`: pending versions count as if their writes had not happened yet.
std::vector<std::byte> Target::tags_of(bool settled) const {
  auto tags = store_.tags();
  for (auto& tagged : tags) {
    if (settled && tagged.version != 0 && store_.entry(tagged.chunk).pending.version == tagged.version) {
      tagged.version = 0;
      tagged.length = 0;
    }
  }
  return encode_tags(tags);
}

Content Target::contents_of(ChunkId chunk, Version version, bool as_is, Status& status) {
  const auto reading = store_.read(chunk, version, 0, kLargestChunk);
  status = reading.status;
  const bool lost = fails(status);
  if (status != Status::ok && !(as_is && lost)) return {};
  auto bytes = std::make_shared<std::vector<std::byte>>(lost ? reading.chunk_length : reading.length);
  if (!lost) status = reading.copy(bytes->data());
  if (!as_is && status == Status::ok && !holds(*bytes, 0, std::as_bytes(std::span(reading.crcs))))
    status = Status::corrupt;
  if (!as_is && status != Status::ok) return {};
  Content content{bytes, *bytes, {}};
  content.crcs.assign(reading.crcs.begin(), reading.crcs.end());
  if (status != Status::ok) content.crcs = wrong_crcs(*bytes);
  status = Status::ok;
  return content;
}

void Target::carry_out(const replica::Reply& reply, Work& work) {
  if (keep_direct(reply.op, {reply.status, reply.version})) return;
  const auto found = asking_.find(reply.op);
  if (found == asking_.end()) return;
  Asking asking = std::move(found->second);
  asking_.erase(found);
  if (asking.wrote) {
    work.calls.push_back([give = std::move(asking.wrote), reply] { give(reply.status, reply.version, reply.length); });
  } else {
    answer_read(std::move(asking), {reply.status, reply.version}, work);
  }
}

void Target::carry_out(const replica::ServeRead& serve, Work& work) {
  if (keep_direct(serve.op, {Status::ok, serve.version})) return;
  const auto found = asking_.find(serve.op);
  if (found == asking_.end()) return;
  Asking asking = std::move(found->second);
  asking_.erase(found);
  answer_read(std::move(asking), {Status::ok, serve.version}, work);
}

// Answers a read that was parked.
void Target::answer_read(Asking asking, Served served, Work& work) {
  work.calls.push_back([self = shared_from_this(), asking = std::move(asking), served] {
    store::Reading reading;
    if (self->resolve(asking.read, served, asking.later, reading)) asking.later(asking.read.number, std::move(reading));
  });
}

// Reads `version` (0: the committed version, or not_found), or a newer version that was committed before the replica
// learned of it. Returns none if the chunk was removed meanwhile.
std::optional<store::Reading> Target::read_version(const ReadEntry& entry, Version version) {
  const ChunkId chunk{entry.inode, entry.index};
  auto reading = store_.read(chunk, version, entry.offset, entry.length);
  if (version == 0) return reading;
  if (reading.status == Status::not_found) reading = store_.read(chunk, 0, entry.offset, entry.length);
  if (reading.status == Status::not_found || reading.version < version) return {};
  on_failed_read(chunk, reading.status);
  return reading;
}

replica::Payload Target::keep(Content content) {
  contents_.emplace(next_payload_, std::move(content));
  return next_payload_++;
}

// ---- The syncer --------------------------------------------------------------------------------------------------

void Target::sync_always() {
  while (sync_once()) {
    // Also while idle, because a store that was opened with damage needs a snapshot at once.
    if (store_.snapshot_due()) store_.snapshot();
    recheck_damaged();
  }
}

bool Target::sync_once() {
  std::vector<Op> riding;
  {
    std::unique_lock lock(mutex_);
    queued_.wait_for(lock, kIdleSync, [this] { return ignores_events() || applied_ != 0 || !riding_.empty(); });
    if (ignores_events()) return false;
    if (applied_ == 0 && riding_.empty() && !dirty_) return true;
    riding.swap(riding_);
    applied_ = 0;
    dirty_ = false;
  }
  const auto begun = Clock::now();
  const auto done = store_.sync();
  syncing_.add(Clock::now() - begun);
  ++groups_;
  made_durable_ += done.size();
  const bool failed = store_.failed(), full = !store_.synced() && !failed;
  Work work;
  if (failed && changed_) work.calls.push_back(changed_);
  {
    std::lock_guard lock(mutex_);
    if (ignores_events()) return false;
    check_lease(work);
    for (const auto& one : done) step_locked(replica::Applied{one.op, one.status, one.length}, work);
    if (full) {
      riding_.insert(riding_.begin(), riding.begin(), riding.end());
      riding.clear();
      dirty_ = true;
    }
    for (const Op op : riding) step_locked(replica::Applied{op, failed ? Status::io_error : Status::ok, 0}, work);
  }
  do_work(work);
  if (full) {
    std::unique_lock lock(mutex_);
    queued_.wait_for(lock, kFullPause, [this] { return ignores_events(); });
  }
  return true;
}

}  // namespace ff::fs3::io
