// The SYNCING target's side of a sync, and a LASTSRV target's answers to the RECOVERING target.
#include <algorithm>

#include "fs3/replica/replica.hpp"

namespace ff::fs3::replica {

// Returns whether the asking target may get answers. Answers are final only when no write from before the routing is in
// flight to the disk.
bool Replica::may_ask(TargetId from, ChainVersion chain_version) const {
  if (chain_version != chain_ || old_ > 0) return false;
  return (role_ == State::syncing && from == predecessor_) || (role_ == State::lastsrv && from == recovering_);
}

void Replica::on(const PageAsk& asked) {
  if (!may_ask(asked.from, asked.chain_version)) {
    answer(asked.op, asked.from, asked.chain_version, Status::stale_routing);
    return;
  }
  Page page{asked.op, target_, chain_, {}, false, floor_};
  lookup_.page(asked.after, options_.page + 1, page.entries);
  if (page.entries.size() > options_.page) {
    page.entries.resize(options_.page);
    page.more = true;
  }
  act(Send{asked.from, std::move(page)});
}

void Replica::on(const SyncDone& done) {
  Payload payload = done.payload;
  const bool mine = role_ == State::syncing && done.from == predecessor_ && done.chain_version == chain_;
  if (mine && uptodate_ == chain_) {
    answer(done.op, done.from, chain_, Status::ok);
  } else if (mine && conclude_ == 0) {
    conclude_ = next_op_++;
    conclude_answer_ = done.op;
    conclude_payload_ = payload;
    floor_ = std::max(floor_, done.floor);  // as Conclude does in the store: new chunks get versions above the floor
    act(Conclude{conclude_, done.floor, payload});
    return;
  } else if (!mine || conclude_ < routing_op_) {  // or a Conclude of an older routing is in flight: the asker retries
    answer(done.op, done.from, done.chain_version, Status::stale_routing);
  }
  release(payload);
}

void Replica::concluded(const Applied& done) {
  const bool current = conclude_ >= routing_op_;
  conclude_ = 0;
  if (!current) old_apply_ended();
  release(conclude_payload_);
  if (done.status == Status::io_error) failed_ = stopping_ = true;
  if (!current || failed_) return;
  if (role_ == State::recovering) {
    if (done.status == Status::ok) {
      walk_.asking = false;
      ++walk_.source;
    } else {
      const Op op = next_op_++;
      asks_[op] = {Ask::tags, walk_.sources[walk_.source], {}, true};
      act(Pause{op});
    }
    return;
  }
  if (done.status != Status::ok) {
    stopping_ = true;
    return;
  }
  complete_ = true;
  uptodate_ = chain_;
  answer(conclude_answer_, predecessor_, chain_, Status::ok);
  report_local_state();
}

void Replica::on(const TagsAsk& asked) {
  if (!may_ask(asked.from, asked.chain_version) || role_ != State::lastsrv) {
    answer(asked.op, asked.from, asked.chain_version, Status::stale_routing);
    return;
  }
  act(Send{asked.from, Tags{asked.op, target_, chain_, floor_, 0}});
}

void Replica::on(const Fetch& asked) {
  const bool in_path = serving() || role_ == State::syncing;
  const bool asked_well =
      in_path ? asked.chain_version == chain_ : role_ == State::lastsrv && may_ask(asked.from, asked.chain_version);
  if (!asked_well) {
    answer(asked.op, asked.from, asked.chain_version, Status::stale_routing);
    return;
  }
  const Entry entry = lookup_.entry(asked.chunk);
  const bool committed = entry.committed == asked.version;
  const bool there = committed || (entry.pending == asked.version && !entry.removes);
  const Status status = asked.version != 0 && there ? Status::ok : Status::not_found;
  const std::uint32_t crc = committed ? entry.crc : entry.pending_crc;
  act(Send{asked.from, Fetched{asked.op, target_, chain_, asked.chunk, asked.version, status, 0, crc}, asked.as_is});
}

}  // namespace ff::fs3::replica
