// The shell of one replica over a simulated disk: the demands of docs/internals/fs3-chain.md ("Shell's duties") and
// docs/internals/fs3-sim.md.
#include "fs3/io/target/target.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "base/crc/crc32c.hpp"
#include "base/testing/check.hpp"
#include "fs3/store/disk/sim_disk.hpp"

using namespace ff::fs3;
using namespace ff::fs3::io;
namespace store = ff::fs3::store;
namespace replica = ff::fs3::replica;
using replica::State;

namespace {

constexpr ChunkId kA{7, 0};
constexpr std::uint32_t kChain = 4;
constexpr TargetId kSelf = 2, kOther = 1;

// A MessageSender that keeps the posted messages; no target answers.
class Box final : public MessageSender {
 public:
  void post(std::weak_ptr<Target>, Posted posted, Content content) override {
    std::lock_guard lock(mutex_);
    posts_.emplace_back(std::move(posted), std::move(content));
    news_.notify_all();
  }
  void pause(std::weak_ptr<Target>, replica::Op) override {}
  void aside(std::function<void()> job) override { job(); }
  void changed() {
    std::lock_guard lock(mutex_);
    changed_ = true;
    news_.notify_all();
  }
  // Waits for the first message of this type. With `or_change` returns none once the target has news to report.
  template <class T>
  std::optional<std::pair<T, Content>> wait(bool or_change = false) {
    std::unique_lock lock(mutex_);
    for (;;) {
      for (auto& [posted, content] : posts_) {
        if (auto* const found = std::get_if<T>(&posted.message)) return std::pair(*found, content);
      }
      if (or_change && changed_) return {};
      news_.wait(lock);
    }
  }
  void wait_for_change() {
    std::unique_lock lock(mutex_);
    news_.wait(lock, [this] { return changed_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable news_;
  std::vector<std::pair<Posted, Content>> posts_;
  bool changed_ = false;
};

struct Bench {
  explicit Bench(std::shared_ptr<store::SimDisk> on = std::make_shared<store::SimDisk>(1)) : disk(std::move(on)) {
    target = std::make_shared<Target>(disk, store::Store::open(*disk, {kSelf, kChain}), kSelf, kChain, 1, box);
    target->on_change([this] { box->changed(); });
    target->start();
  }
  ~Bench() { target->stop(); }

  void chain(ChainVersion version, std::vector<replica::Member> members) {
    target->routing({version, std::move(members)});
    target->lease(Target::Clock::now() + std::chrono::hours(1), version);
  }
  Status write(std::uint64_t seq, const std::string& text) {
    WriteEntry entry;
    entry.inode = kA.inode;
    entry.client = 5;
    entry.seq = seq;
    entry.chain_version = target->report().chain_version;
    entry.length = static_cast<std::uint32_t>(text.size());
    Content content;
    content.bytes = std::as_bytes(std::span(text));
    content.crcs = crcs_of(text);
    content.holder = std::make_shared<int>();
    std::mutex mutex;
    std::condition_variable answered;
    std::optional<Status> status;
    target->write(entry, content, [&](Status told, Version, std::uint32_t) {
      std::lock_guard lock(mutex);
      status = told;
      answered.notify_all();
    });
    std::unique_lock lock(mutex);
    answered.wait(lock, [&] { return status.has_value(); });
    return *status;
  }
  static std::vector<std::uint32_t> crcs_of(const std::string& text) {
    std::vector<std::uint32_t> crcs;
    for (std::size_t at = 0; at < text.size(); at += kBlock) {
      crcs.push_back(ff::crc32c(0, text.data() + at, std::min(kBlock, text.size() - at)));
    }
    return crcs;
  }

  std::shared_ptr<Box> box = std::make_shared<Box>();
  std::shared_ptr<store::SimDisk> disk;
  std::shared_ptr<Target> target;
};

std::string text_of(const store::Reading& reading) {
  std::string text(reading.length, '\0');
  CHECK(reading.copy(text.data()) == Status::ok);
  return text;
}

void a_read_gets_the_version_that_its_replica_has_not_heard_of_yet() {
  Bench bench;
  bench.chain(1, {{kSelf, State::serving, 1}});
  CHECK(bench.write(1, "old") == Status::ok);
  store::Apply apply;
  apply.chunk = kA;
  apply.base = bench.target->store().entry(kA).committed.version;
  apply.version = apply.base + 1;
  apply.committed = true;
  const std::string newer = "newer";
  apply.bytes = std::as_bytes(std::span(newer));
  CHECK(bench.target->store().apply(1 << 20, apply) == Status::ok);
  bench.target->store().sync();  // and the replica is not told
  ReadEntry entry;
  entry.inode = kA.inode;
  entry.chain_version = 1;
  entry.length = 100;
  store::Reading reading;
  const auto at_once = [](std::size_t, store::Reading) { CHECK(false); };
  const Target::Numbered read{0, entry};
  CHECK(bench.target->read({&read, 1}, {&reading, 1}, at_once) == 1);
  CHECK(reading.status == Status::ok && text_of(reading) == "newer");
}

void each_read_of_a_frame_gets_its_own_answer() {
  Bench bench;
  bench.chain(1, {{kSelf, State::serving, 1}});
  CHECK(bench.write(1, "here") == Status::ok);
  std::vector<Target::Numbered> reads;
  for (std::size_t n = 0; n < kMostEntries; ++n) {
    ReadEntry entry;
    entry.inode = n % 3 == 1 ? kA.inode + 99 : kA.inode;
    entry.index = kA.index;
    entry.chain_version = n % 3 == 2 ? 7 : 1;
    entry.length = 100;
    reads.push_back({kMostEntries - 1 - n, entry});
  }
  std::vector<store::Reading> readings(kMostEntries);
  const auto at_once = [](std::size_t, store::Reading) { CHECK(false); };
  CHECK(bench.target->read(reads, readings, at_once) == kMostEntries);
  constexpr std::array kWanted = {Status::ok, Status::not_found, Status::stale_routing};
  for (const auto& read : reads) {
    const auto& reading = readings[read.number];
    const std::size_t n = kMostEntries - 1 - read.number;
    CHECK(reading.status == kWanted[n % 3]);
    CHECK(reading.status != Status::ok || text_of(reading) == "here");
  }
}

void a_store_that_is_not_whole_says_so_at_once() {
  auto disk = std::make_shared<store::SimDisk>(2);
  {
    Bench bench(disk);
    CHECK(bench.target->report().local.state == replica::Local::online);
    bench.chain(1, {{kOther, State::serving, 1}, {kSelf, State::syncing, 1}});
    bench.target->store().sync();
  }
  Bench again(disk);
  CHECK(again.target->report().local.state == replica::Local::faulty);
}

// Power fails within the sync that ends a resync: the store is complete only if it has all tags and the floor.
void complete_is_the_last_word_of_a_sync() {
  std::vector<store::Tagged> tags;
  for (std::uint64_t client = 1; client <= 60; ++client) tags.push_back({{client, 0, 3}, kA, 9, 4});
  const auto payload = std::make_shared<std::vector<std::byte>>(encode_tags(tags));
  int complete = 0, cut = 0;
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    auto disk = std::make_shared<store::SimDisk>(seed);
    {
      Bench bench(disk);
      bench.chain(1, {{kOther, State::serving, 1}, {kSelf, State::syncing, 1}});
      bench.target->store().sync();
      disk->fail(seed % 4, store::Fault::io);
      Content content;
      content.bytes = *payload;
      content.holder = payload;
      bench.target->receive(replica::SyncDone{8, kOther, 1, 30, 0}, content);
      bench.box->wait<replica::Answer>(true);
    }
    disk->power_cut(seed);
    auto held = store::Store::open(*disk, {kSelf, kChain});
    if (held.state()[0] != 0) {
      ++cut;
    } else {
      ++complete;
      CHECK(held.tags().size() == tags.size() && held.floor() == 30);
    }
  }
  CHECK(complete > 0 && cut > 0);
}

// While the log is full, a Conclude is not answered: it takes effect only when its record is durable.
void what_rides_along_waits_for_space() {
  Bench bench;
  bench.chain(1, {{kOther, State::serving, 1}, {kSelf, State::syncing, 1}});
  bench.target->store().sync();
  bench.disk->fail(0, store::Fault::no_space, 3);
  bench.target->receive(replica::SyncDone{8, kOther, 1, 30, 0}, {});
  const auto answer = bench.box->wait<replica::Answer>();
  CHECK(answer && answer->first.status == Status::ok);
  bench.target->stop();
  bench.disk->power_cut(5);
  CHECK(store::Store::open(*bench.disk, {kSelf, kChain}).state()[0] == 0);
}

// Starts a write that waits for the successor; returns the message sent there.
replica::Update begin_write(Bench& bench, const std::string& text) {
  bench.chain(1, {{kSelf, State::serving, 1}, {kOther, State::serving, 1}});
  WriteEntry entry;
  entry.inode = kA.inode;
  entry.client = 5;
  entry.seq = 1;
  entry.chain_version = 1;
  entry.length = static_cast<std::uint32_t>(text.size());
  Content content;
  content.bytes = std::as_bytes(std::span(text));
  content.crcs = Bench::crcs_of(text);
  content.holder = std::make_shared<int>();
  bench.target->write(entry, content, [](Status, Version, std::uint32_t) {});
  return bench.box->wait<replica::Update>()->first;
}

QueryAnswer ask(Bench& bench, std::uint32_t upto, ChainVersion version = 1) {
  QueryAnswer answer;
  bench.target->last({kA.inode, kChain, version, upto, 1}, answer);
  return answer;
}

// A serving target answers questions from committed data; a write that waits for its successor is not visible yet.
void questions_find_what_is_committed() {
  Bench bench;
  CHECK(ask(bench, kLastIndex).status == Status::stale_routing);
  const auto update = begin_write(bench, "some bytes");
  CHECK(ask(bench, kLastIndex).status == Status::not_found);
  bench.target->receive(replica::Answer{update.op, kOther, 1, Status::ok}, {});
  const QueryAnswer found = ask(bench, kLastIndex);
  CHECK(found.status == Status::ok && found.index == kA.index && found.length == 10 && found.run == 1);
  CHECK(ask(bench, kLastIndex, 2).status == Status::stale_routing);
  bench.target->stop();
  CHECK(ask(bench, kLastIndex).status == Status::stale_routing);
}

// No caller waits for a batch that has only COMMITs, but a failed sync is reported all the same.
void a_failed_sync_is_reported_although_no_caller_waits() {
  Bench bench;
  const auto update = begin_write(bench, "some bytes");
  bench.disk->fail(0, store::Fault::io);
  bench.target->receive(replica::Answer{update.op, kOther, 1, Status::ok}, {});
  bench.box->wait_for_change();
  CHECK(bench.target->report().failed);
}

// After the store has refused a Commit, the replica's view of the store is wrong, so the target does nothing more.
void a_target_whose_commit_was_refused_says_nothing_more() {
  Bench bench;
  const auto update = begin_write(bench, "some bytes");
  bench.disk->fail(0, store::Fault::io);
  bench.target->store().raise_floor(1 << 10);
  bench.target->store().sync();
  CHECK(bench.target->store().failed());
  bench.target->receive(replica::Answer{update.op, kOther, 1, Status::ok}, {});
  bench.box->wait_for_change();
  CHECK(bench.target->report().failed);
  ReadEntry entry;
  entry.inode = kA.inode;
  entry.chain_version = 1;
  entry.length = 100;
  const Target::Numbered read{0, entry};
  store::Reading reading;
  CHECK(bench.target->read({&read, 1}, {&reading, 1}, [](std::size_t, store::Reading) { CHECK(false); }) == 1);
  CHECK(reading.status == Status::stale_routing);
  CHECK(bench.write(2, "more bytes") == Status::stale_routing);
}

// An unreadable extent is sent as it is: zeros with CRCs that do not match.
void what_cannot_be_read_is_sent_as_damage() {
  Bench bench;
  bench.chain(1, {{kSelf, State::serving, 1}});
  CHECK(bench.write(1, std::string(5000, 'x')) == Status::ok);
  const Version version = bench.target->store().entry(kA).committed.version;
  bench.chain(2, {{kSelf, State::lastsrv, 1}, {kOther, State::recovering, 1}});
  bench.disk->fail(0, store::Fault::io);
  bench.target->receive(replica::Fetch{3, kOther, 2, kA, version, true}, {});
  const auto fetched = bench.box->wait<replica::Fetched>();
  CHECK(fetched->first.status == Status::ok && fetched->second.bytes.size() == 5000);
  const auto& crcs = fetched->second.crcs;
  CHECK(crcs.size() == 2 && !holds(fetched->second.bytes, 0, std::as_bytes(std::span(crcs))));
}

// Damage found while the target is WAITING is checked again once the target serves, although no event reports it again.
void damage_is_checked_again_once_the_target_serves() {
  Bench bench;
  bench.chain(1, {{kSelf, State::serving, 1}});
  CHECK(bench.write(1, std::string(5000, 'x')) == Status::ok);
  for (const std::string& name : bench.disk->list()) {
    if (!name.starts_with("data-")) continue;
    const std::string other(5000, 'y');
    const store::File file = bench.disk->open(name, false);
    bench.disk->write(file, 0, other.data(), other.size());
    bench.disk->close(file);
  }
  bench.chain(2, {{kOther, State::serving, 1}, {kSelf, State::waiting, 0}});
  bench.target->suspect(kA);
  CHECK(bench.target->counts().damaged == 1 && bench.target->report().busy_chunks == 0);
  const auto found = bench.target->findings();
  CHECK(found.first.size() == 1 && found.first[0].chunk == kA && found.first[0].damaged && found.more == 0);
  bench.chain(3, {{kOther, State::serving, 1}, {kSelf, State::serving, 1}});
  const auto asked = bench.box->wait<replica::Fetch>();
  CHECK(asked->first.chunk == kA && asked->first.chain_version == 3 && bench.target->counts().damaged == 1);
}

}  // namespace

int main() {
  a_read_gets_the_version_that_its_replica_has_not_heard_of_yet();
  each_read_of_a_frame_gets_its_own_answer();
  a_store_that_is_not_whole_says_so_at_once();
  complete_is_the_last_word_of_a_sync();
  what_rides_along_waits_for_space();
  questions_find_what_is_committed();
  a_failed_sync_is_reported_although_no_caller_waits();
  a_target_whose_commit_was_refused_says_nothing_more();
  what_cannot_be_read_is_sent_as_damage();
  damage_is_checked_again_once_the_target_serves();
}
