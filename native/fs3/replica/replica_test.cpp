// One test a rule of docs/internals/fs3-chain.md, as transcripts: events of a replica, and its actions.
#include "fs3/replica/replica.hpp"

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "base/testing/check.hpp"
#include "base/testing/one_thread.hpp"
#include "fs3/replica/print.hpp"
#include "fs3/replica/simulation/map_store.hpp"

using namespace ff::fs3;
using namespace ff::fs3::replica;

namespace {

using Lines = std::vector<std::string>;

constexpr ChunkId kA{1, 0}, kB{2, 0};
constexpr State kServing = State::serving, kSyncing = State::syncing, kLast = State::lastsrv;

// A replica over a map, with itself as target `id`, incarnation 1.
struct Bench {
  explicit Bench(TargetId id) : target(id) { restart(1); }

  void restart(Incarnation incarnation) {
    replica = std::make_unique<Replica>(target, incarnation, store, Options{2, 1});
  }
  Lines step(const Event& event) {
    Actions actions;
    replica->step(event, actions);
    Lines lines;
    for (const Action& action : actions) {
      lines.push_back(to_string(action));
      if (const auto* a = std::get_if<Apply>(&action)) refused = store.apply(*a, a->payload);
      if (const auto* c = std::get_if<Commit>(&action)) store.commit(*c);
      if (const auto* d = std::get_if<Drop>(&action)) store.drop(*d);
      if (std::holds_alternative<Mark>(action)) store.mark();
      if (const auto* c = std::get_if<Conclude>(&action)) store.conclude(*c, {});
    }
    return lines;
  }
  Lines sync() {
    Lines all;
    std::vector<Applied> done = store.sync();
    for (const Applied& applied : refused) done.push_back(applied);
    refused.clear();
    for (const Applied& applied : done) {
      for (std::string& line : step(applied)) all.push_back(std::move(line));
    }
    return all;
  }
  Lines chain(ChainVersion version, std::vector<Member> members) {
    step(Lease{true, version});
    return step(Routing{version, std::move(members)});
  }

  TargetId target;
  MapStore store;
  std::unique_ptr<Replica> replica;
  std::vector<Applied> refused;
};

void expect(const char* where, const Lines& found, const Lines& wanted) {
  if (found == wanted) return;
  std::fprintf(stderr, "%s\n  found:\n", where);
  for (const std::string& line : found) std::fprintf(stderr, "    \"%s\",\n", line.c_str());
  std::fprintf(stderr, "  wanted:\n");
  for (const std::string& line : wanted) std::fprintf(stderr, "    \"%s\",\n", line.c_str());
  std::abort();
}
#define STRING2(x) #x
#define STRING(x) STRING2(x)
#define EXPECT(found, ...) expect(__FILE__ ":" STRING(__LINE__), found, Lines __VA_ARGS__)

ClientWrite write(Op op, ChainVersion version, ChunkId chunk, std::uint64_t seq, Payload payload = 7) {
  return {op, version, chunk, Kind::write, 0, 9, {5, 0, seq}, payload};
}
ClientWrite removal(Op op, ChainVersion version, ChunkId chunk, std::uint64_t seq) {
  return {op, version, chunk, Kind::remove, 0, 0, {5, 0, seq}, 0};
}
Update update(Op op, Op settled, ChainVersion version, ChunkId chunk, Version base, Version v) {
  return {op, settled, 1, version, chunk, base, v, Kind::write, 0, 9, {5, 0, v}, 8, false};
}
// A lone server with chunk A at version 2.
Bench lone() {
  Bench b(1);
  b.chain(1, {{1, kServing, 1}});
  b.step(write(1, 1, kA, 1));
  EXPECT(b.sync(), {"Reply 1 ok v2 length 1", "Release payload 7"});
  return b;
}

void head_applies_sends_commits_replies() {
  Bench b(1);
  b.chain(3, {{1, kServing, 1}, {2, kServing, 1}});
  EXPECT(b.step(write(1, 3, kA, 1)), {"Apply 1 write 1.0 v2 on v0 at 0+9 pending tag 5/0#1 payload 7"});
  EXPECT(b.sync(), {"Send to 2: Update 2 from 1 at 3 write 1.0 v2 on v0 at 0+9 tag 5/0#1 payload 7"});
  EXPECT(b.step(Read{9, 3, kA, false}), {});  // parked: another reader may have seen v2
  EXPECT(b.step(Read{10, 3, kA, true}), {"ServeRead 10 1.0 v2"});
  EXPECT(b.step(Answer{2, 2, 3, Status::ok}),
         {"Commit 1.0 v2", "Reply 1 ok v2 length 1", "Release payload 7", "ServeRead 9 1.0 v2"});
  CHECK(b.replica->busy_chunks() == 0 && b.replica->outstanding() == 0);
}

void refusals_at_the_door() {
  Bench b(1);
  const Lines refused{"Reply 1 stale_routing", "Release payload 7"};
  CHECK(b.step(write(1, 0, kA, 1)) == refused);  // no routing
  b.chain(3, {{1, kServing, 1}, {2, kServing, 1}});
  CHECK(b.step(write(1, 2, kA, 1)) == refused);  // another version
  b.step(Lease{false});
  CHECK(b.step(write(1, 3, kA, 1)) == refused);
  EXPECT(b.step(Read{1, 3, kA, false}), {"Reply 1 stale_routing"});
  b.step(Lease{true, 4});  // the replica does not know version 4 of the chain yet
  CHECK(b.step(write(1, 3, kA, 1)) == refused);
  b.chain(4, {{2, kServing, 1}, {1, kServing, 1}});
  CHECK(b.step(write(1, 4, kA, 1)) == refused);  // not the head
  EXPECT(b.step(Read{1, 4, kA, false}), {"Reply 1 not_found"});
  b.chain(5, {{1, kServing, 2}});
  CHECK(b.step(write(1, 5, kA, 1)) == refused);  // another incarnation
}

void a_tag_is_answered_once() {
  Bench b = lone();
  EXPECT(b.step(write(2, 1, kA, 1)), {"Reply 2 ok v2 length 1", "Release payload 7"});
  b.step(write(3, 1, kA, 2));
  EXPECT(b.step(write(4, 1, kA, 2, 6)), {"Release payload 6"});  // joins
  EXPECT(b.step(write(5, 1, kA, 1, 6)), {"Reply 5 duplicate", "Release payload 6"});
  EXPECT(b.sync(), {"Reply 3 ok v3 length 1", "Reply 4 ok v3 length 1", "Release payload 7"});
}

void a_lease_that_ends_answers_all() {
  Bench b = lone();
  b.step(write(2, 1, kA, 2));
  b.step(ClientWrite{3, 1, kA, Kind::write, 0, 9, {6, 0, 1}, 6});
  EXPECT(b.step(Lease{false}), {"Reply 2 stale_routing", "Reply 3 stale_routing", "Release payload 6"});
  EXPECT(b.sync(), {"Release payload 7"});
  b.step(Lease{true});
  EXPECT(b.step(write(4, 1, kA, 2, 9)), {"Reply 4 ok v3 length 1", "Release payload 9"});
}

void tail_commits_in_the_same_apply_and_drops_late_duplicates() {
  Bench b(2);
  b.chain(3, {{1, kServing, 1}, {2, kServing, 1}});
  EXPECT(b.step(update(4, 4, 3, kA, 0, 2)), {"Apply 1 write 1.0 v2 on v0 at 0+9 committed tag 5/0#2 payload 8"});
  EXPECT(b.step(update(4, 4, 3, kA, 0, 2)), {"Release payload 8"});
  EXPECT(b.sync(), {"Send to 1: Answer 4 from 2 at 3 ok", "Release payload 8"});
  EXPECT(b.step(update(4, 4, 3, kA, 0, 2)), {"Send to 1: Answer 4 from 2 at 3 ok", "Release payload 8"});
  Update removed{5, 5, 1, 3, kA, 2, 3, Kind::remove, 0, 0, {5, 0, 3}, 0, false};
  b.step(removed);
  EXPECT(b.sync(), {"Send to 1: Answer 5 from 2 at 3 ok"});
  EXPECT(b.step(update(4, 4, 3, kA, 0, 2)), {"Release payload 8"});  // applied, it would restore A
}

void a_low_version_is_new_where_another_chunk_was_removed() {
  Bench b(2);
  b.chain(3, {{1, kServing, 1}, {2, kServing, 1}});
  b.step(Update{4, 4, 1, 3, kB, 0, 9, Kind::remove, 0, 0, {}, 0, false});
  b.sync();
  EXPECT(b.step(update(5, 4, 3, kA, 0, 2)), {"Apply 2 write 1.0 v2 on v0 at 0+9 committed tag 5/0#2 payload 8"});
}

void updates_of_others_and_gaps() {
  Bench b(2);
  b.chain(3, {{1, kServing, 1}, {2, kServing, 1}});
  EXPECT(b.step(update(4, 4, 2, kA, 0, 2)), {"Send to 1: Answer 4 from 2 at 2 stale_routing", "Release payload 8"});
  EXPECT(b.step(update(4, 4, 3, kA, 5, 6)),
         {"Send to 1: Answer 4 from 2 at 3 diverged", "Release payload 8", "Mark", "LocalState FAULTY"});
  EXPECT(b.step(Read{1, 3, kA, false}), {"Reply 1 stale_routing"});
  EXPECT(b.step(Routing{4, {{1, kServing, 1}, {2, State::waiting, 1}}}), {"LocalState ONLINE"});
}

void no_space_behind_drops_the_version() {
  Bench b(1);
  b.chain(3, {{1, kServing, 1}, {2, kServing, 1}});
  b.step(write(1, 3, kA, 1));
  b.sync();
  EXPECT(b.step(Answer{2, 2, 3, Status::no_space}), {"Drop 3 1.0 v2"});
  EXPECT(b.sync(), {"Reply 1 no_space", "Release payload 7"});
  EXPECT(b.step(write(2, 3, kA, 1)),
         {"Apply 4 write 1.0 v3 on v0 at 0+9 pending tag 5/0#1 payload 7"});  // under another number
}

void a_refused_update_stays_refused() {
  Bench b(2);
  b.chain(3, {{1, kServing, 1}, {2, kServing, 1}});
  b.store.fill(true);
  b.step(update(4, 4, 3, kA, 0, 2));
  EXPECT(b.sync(), {"Send to 1: Answer 4 from 2 at 3 no_space", "Release payload 8"});
  b.store.fill(false);
  EXPECT(b.step(update(4, 4, 3, kA, 0, 2)), {"Send to 1: Answer 4 from 2 at 3 no_space", "Release payload 8"});
}

void a_send_is_repeated_until_routing_changes() {
  Bench b(1);
  b.chain(3, {{1, kServing, 1}, {2, kServing, 1}});
  b.step(write(1, 3, kA, 1));
  b.sync();
  EXPECT(b.step(SendFailed{2}), {"Pause 2"});
  EXPECT(b.step(Answer{2, 2, 3, Status::stale_routing}), {});  // of the first try, late
  EXPECT(b.step(Retry{2}), {"Send to 2: Update 2 from 1 at 3 write 1.0 v2 on v0 at 0+9 tag 5/0#1 payload 7"});
  EXPECT(b.chain(4, {{1, kServing, 1}, {2, State::offline, 1}}),
         {"Commit 1.0 v2", "Reply 1 ok v2 length 1", "Release payload 7"});
}

void an_apply_under_way_while_a_target_begins_to_sync() {
  Bench b = lone();
  b.step(write(2, 1, kA, 2));  // committed in its Apply
  EXPECT(b.chain(2, {{1, kServing, 1}, {2, kSyncing, 4}}), {"Send to 2: PageAsk 3 from 1 at 2 after 0.0"});
  EXPECT(b.step(Page{3, 2, 2, {}, false, 1}), {});  // A waits for its job: no SyncDone yet
  EXPECT(b.sync(), {"Send to 2: Update 4 from 1 at 2 replace 1.0 v3 on v2 tag 5/0#2"});
  EXPECT(b.step(Answer{4, 2, 2, Status::ok}),
         {"Reply 2 ok v3 length 1", "Release payload 7", "Send to 2: SyncDone 5 from 1 at 2 floor 1"});
}

void a_removal_waits_for_creations_below_it() {
  Bench b = lone();
  b.step(write(2, 1, kA, 2));
  b.sync();  // A at 3
  EXPECT(b.step(ClientWrite{3, 1, kB, Kind::write, 0, 9, {6, 0, 1}, 6}),
         {"Apply 3 write 2.0 v2 on v0 at 0+9 committed tag 6/0#1 payload 6"});
  EXPECT(b.step(removal(4, 1, kA, 3)), {});  // would be v4
  EXPECT(b.sync(), {"Reply 3 ok v2 length 1", "Release payload 6", "Apply 4 remove 1.0 v4 on v3 committed tag 5/0#3"});
  EXPECT(b.sync(), {"Reply 4 ok v4 length 0"});
  EXPECT(b.step(write(5, 1, kA, 4)), {"Apply 5 write 1.0 v5 on v0 at 0+9 committed tag 5/0#4 payload 7"});
}

void a_sync_sends_what_differs() {
  Bench b = lone();
  EXPECT(b.chain(2, {{1, kServing, 1}, {2, kSyncing, 4}}), {"Send to 2: PageAsk 2 from 1 at 2 after 0.0"});
  EXPECT(b.step(Page{2, 2, 2, {{kB, 9, 1, 1, 0, false}}, false, 1}),
         {"Send to 2: Update 3 from 1 at 2 replace 1.0 v2 on v0"});
  EXPECT(b.step(Answer{3, 2, 2, Status::ok}), {"Send to 2: Update 4 from 1 at 2 forget 2.0 v1 on v0"});
  EXPECT(b.step(Answer{4, 2, 2, Status::ok}), {"Send to 2: SyncDone 5 from 1 at 2 floor 1"});
  EXPECT(b.step(Answer{5, 2, 2, Status::ok}), {});
}

void a_syncing_target_takes_whatever_comes() {
  Bench b(2);
  EXPECT(b.chain(2, {{1, kServing, 1}, {2, kSyncing, 1}}), {"Mark"});
  CHECK(!b.store.complete());
  EXPECT(b.step(PageAsk{1, 1, 2, {}}), {"Send to 1: Page 1 from 2 at 2 floor 1 []"});
  Update replace = update(3, 2, 2, kA, 5, 6);
  replace.kind = Kind::replace;
  EXPECT(b.step(replace), {"Apply 1 replace 1.0 v6 on anything committed tag 5/0#6 payload 8"});
  EXPECT(b.sync(), {"Send to 1: Answer 3 from 2 at 2 ok", "Release payload 8"});
  EXPECT(b.step(Read{1, 2, kA, false}), {"Reply 1 stale_routing"});
  EXPECT(b.step(SyncDone{4, 1, 2, 3, 6}), {"Conclude 2 floor 3 payload 6"});
  EXPECT(b.sync(), {"Release payload 6", "Send to 1: Answer 4 from 2 at 2 ok", "LocalState UPTODATE at 2"});
  CHECK(b.store.complete() && b.store.floor() == 3);
}

void recovery_takes_contents_then_removals_then_tags() {
  Bench b = lone();
  EXPECT(b.chain(2, {{1, State::recovering, 1}, {2, kLast, 0}}), {"Send to 2: PageAsk 2 from 1 at 2 after 0.0"});
  EXPECT(b.step(Page{2, 2, 2, {{kB, 5, 1, 1, 6, false}}, false, 4}), {"Send to 2: Fetch 3 from 1 at 2 2.0 v6"});
  EXPECT(b.step(Fetched{3, 2, 2, kB, 6, Status::ok, 9, 0}), {"Apply 4 replace 2.0 v6 on anything committed payload 9"});
  EXPECT(b.sync(), {"Release payload 9", "Send to 2: PageAsk 5 from 1 at 2 after 0.0"});
  EXPECT(b.step(Page{5, 2, 2, {{kB, 5, 1, 1, 6, false}}, false, 4}), {"Apply 6 remove 1.0 v4 on anything committed"});
  EXPECT(b.sync(), {"Send to 2: TagsAsk 7 from 1 at 2"});
  EXPECT(b.step(Tags{7, 2, 2, 4, 3}), {"Conclude 8 floor 4 payload 3"});
  EXPECT(b.sync(), {"Release payload 3", "LocalState UPTODATE at 2"});
}

// A delayed duplicate arrives after a newer version, while an older op of another chunk is still unanswered.
void a_syncing_target_takes_each_update_once() {
  Bench b(2);
  b.chain(3, {{1, kServing, 1}, {2, kSyncing, 1}});
  Update first = update(5, 4, 3, kA, 0, 2), second = update(6, 4, 3, kA, 2, 3);
  first.kind = second.kind = Kind::replace;
  b.step(first);
  b.sync();
  b.step(second);
  b.sync();
  EXPECT(b.step(first), {"Send to 1: Answer 5 from 2 at 3 ok", "Release payload 8"});
}

// The other target's pending removal found no chunk, nor does this target; yet a client may get the removal's version.
void recovery_takes_the_number_of_a_removal_of_nothing() {
  Bench b = lone();
  b.chain(2, {{1, State::recovering, 1}, {2, kLast, 0}});
  EXPECT(b.step(Page{2, 2, 2, {{kA, 2, 1, 1}, {kB, 0, 0, 0, 6, true}}, false, 1}),
         {"Send to 2: PageAsk 3 from 1 at 2 after 0.0"});
  EXPECT(b.step(Page{3, 2, 2, {{kA, 2, 1, 1}, {kB, 0, 0, 0, 6, true}}, false, 1}),
         {"Apply 4 remove 2.0 v6 on anything committed"});
  EXPECT(b.sync(), {"Send to 2: TagsAsk 5 from 1 at 2"});
}

void a_target_is_asked_only_after_its_last_apply() {
  Bench b(2);
  b.chain(3, {{1, kServing, 1}, {2, kServing, 1}});
  b.step(update(4, 4, 3, kA, 0, 2));
  b.chain(4, {{1, State::recovering, 1}, {2, kLast, 1}});
  EXPECT(b.step(PageAsk{1, 1, 4, {}}), {"Send to 1: Answer 1 from 2 at 4 stale_routing"});
  EXPECT(b.sync(), {"Release payload 8"});
  CHECK(b.step(PageAsk{1, 1, 4, {}}).front().starts_with("Send to 1: Page 1 from 2 at 4 floor 1 [1.0 v2"));
}

void damage_is_fetched_from_another() {
  Bench b = lone();
  b.chain(2, {{1, kServing, 1}, {2, kServing, 1}, {3, kServing, 1}});
  b.store.spoil(kA, 2);
  EXPECT(b.step(write(2, 2, kA, 2)), {"Apply 2 write 1.0 v3 on v2 at 0+9 pending tag 5/0#2 payload 7"});
  EXPECT(b.sync(), {"Send to 2: Fetch 3 from 1 at 2 1.0 v2"});
  EXPECT(b.step(SendFailed{3}), {"Send to 3: Fetch 4 from 1 at 2 1.0 v2"});
  EXPECT(b.step(Fetched{4, 3, 2, kA, 2, Status::corrupt, 0}), {"Pause 5"});  // target 2 may have it
  EXPECT(b.step(Retry{5}), {"Send to 2: Fetch 6 from 1 at 2 1.0 v2"});
  EXPECT(b.step(Fetched{6, 2, 2, kA, 2, Status::ok, 4, b.store.entry(kA).crc}),
         {"Apply 7 replace 1.0 v2 on anything committed payload 4"});
  EXPECT(b.sync(), {"Release payload 4", "Apply 8 write 1.0 v3 on v2 at 0+9 pending tag 5/0#2 payload 7"});
}

// The chunk's bytes are damaged again before each retry of the write.
void a_disk_that_damages_all_it_is_given_is_given_up() {
  Bench b = lone();
  b.chain(2, {{1, kServing, 1}, {2, kServing, 1}});
  const std::uint32_t crc = b.store.entry(kA).crc;
  b.step(write(2, 2, kA, 2));
  for (Op op = 2; op < 11; op += 3) {
    CHECK(b.step(Applied{op, Status::corrupt, 0}).front().starts_with("Send to 2: Fetch"));
    CHECK(b.step(Fetched{op + 1, 2, 2, kA, 2, Status::ok, 4, crc}).front().starts_with("Apply"));
    CHECK(b.step(Applied{op + 2, Status::ok, 1}).back().starts_with("Apply"));
  }
  EXPECT(b.step(Applied{11, Status::corrupt, 0}), {"Reply 2 corrupt", "Release payload 7"});
}

void a_disk_without_room_for_a_good_copy_is_full_not_damaged() {
  Bench b = lone();
  b.chain(2, {{1, kServing, 1}, {2, kServing, 1}});
  b.store.spoil(kA, 2);
  b.step(write(2, 2, kA, 2));
  EXPECT(b.sync(), {"Send to 2: Fetch 3 from 1 at 2 1.0 v2"});
  b.store.fill(true);
  b.step(Fetched{3, 2, 2, kA, 2, Status::ok, 4, b.store.entry(kA).crc});
  EXPECT(b.sync(), {"Release payload 4", "Reply 2 no_space", "Release payload 7"});
}

// In a chain of two: the target recovered, its pending bytes are damaged, and the other target has intact bytes.
void what_the_syncing_target_has_is_fetched_not_replaced() {
  Bench b(1);
  b.chain(3, {{1, kServing, 1}, {2, kServing, 1}});
  b.step(write(1, 3, kA, 1));
  b.sync();
  b.restart(2);
  b.store.spoil(kA, 2);
  const Entry mine = b.store.entry(kA);
  b.chain(4, {{1, State::recovering, 2}, {2, kLast, 1}});
  const Lines sent = b.chain(5, {{1, kServing, 2}, {2, kSyncing, 2}});
  CHECK(sent.front() == "Send to 2: Update 2 from 1 at 5 replace 1.0 v2 on v0 tag 5/0#1");
  EXPECT(b.step(SendFailed{2, Status::corrupt}), {"Send to 2: Fetch 4 from 1 at 5 1.0 v2"});
  EXPECT(b.step(SendFailed{4}), {"Pause 5"});  // nothing is replaced before the other target has answered
  EXPECT(b.step(Retry{5}), {"Send to 2: Fetch 6 from 1 at 5 1.0 v2"});
  EXPECT(b.step(Fetched{6, 2, 5, kA, 2, Status::ok, 4, mine.pending_crc}),
         {"Apply 7 replace 1.0 v2 on anything pending tag 5/0#1 payload 4"});
  EXPECT(b.sync(), {"Release payload 4", "Send to 2: Update 8 from 1 at 5 replace 1.0 v2 on v0 tag 5/0#1"});
}

// The target recovered, its pending bytes are damaged, and no target that served last had that version.
void a_damaged_version_that_nobody_else_has_is_dropped() {
  Bench b = lone();
  b.chain(3, {{1, kServing, 1}, {2, kServing, 1}});
  b.step(write(9, 3, kA, 2));
  b.sync();
  b.restart(2);
  b.store.spoil(kA, 3);
  b.chain(4, {{1, State::recovering, 2}, {2, kLast, 1}});
  b.step(Page{1, 2, 4, {{kA, 2, 1, 1}}, false, 1});
  b.chain(5, {{1, kServing, 2}, {2, kSyncing, 2}});
  EXPECT(b.step(SendFailed{3, Status::corrupt}), {"Send to 2: Fetch 5 from 1 at 5 1.0 v3"});
  EXPECT(b.step(Fetched{5, 2, 5, kA, 3, Status::not_found, 0, 0}), {"Drop 6 1.0 v3"});
  b.sync();
  CHECK(b.store.entry(kA).pending == 0 && b.store.entry(kA).committed == 2);
}

// The disk lost a write of the head before an Update was sent to the SYNCING successor.
void a_damaged_write_that_went_nowhere_is_written_again() {
  Bench b = lone();
  b.chain(2, {{1, kServing, 1}, {2, kSyncing, 1}});
  b.step(write(9, 2, kA, 2));
  b.sync();
  b.store.spoil(kA, 3);
  EXPECT(b.step(SendFailed{4, Status::corrupt}), {"Send to 2: Fetch 5 from 1 at 2 1.0 v3"});
  EXPECT(b.step(Fetched{5, 2, 2, kA, 3, Status::not_found, 0, 0}), {"Drop 6 1.0 v3"});
  EXPECT(b.sync(), {"Reply 9 stale_routing", "Release payload 7"});
  EXPECT(b.step(write(10, 2, kA, 2)), {"Apply 7 write 1.0 v4 on v2 at 0+9 pending tag 5/0#2 payload 7"});
}

// The disk lost a write of the head after an Update was sent.
void a_damaged_write_that_may_be_elsewhere_stays() {
  Bench b = lone();
  b.chain(2, {{1, kServing, 1}, {2, kSyncing, 1}});
  b.step(write(9, 2, kA, 2));
  b.sync();
  EXPECT(b.step(SendFailed{4, Status::io_error}), {"Pause 4"});
  b.store.spoil(kA, 3);
  b.step(Retry{4});
  EXPECT(b.step(SendFailed{4, Status::corrupt}), {"Send to 2: Fetch 5 from 1 at 2 1.0 v3"});
  EXPECT(b.step(Fetched{5, 2, 2, kA, 3, Status::not_found, 0, 0}),
         {"Unrepairable 1.0 v3", "Send to 2: Update 6 from 1 at 2 replace 1.0 v3 on v2 tag 5/0#2 (as is)"});
}

void a_version_of_another_life_is_no_good_copy() {
  Bench b = lone();
  b.store.spoil(kA, 2);
  b.chain(2, {{1, kServing, 1}, {2, kSyncing, 1}});
  EXPECT(b.step(Page{2, 2, 2, {{kA, 0, 0, 0, 2, false, 99}}, false, 1}),
         {"Send to 2: Update 3 from 1 at 2 replace 1.0 v2 on v0"});
  EXPECT(b.step(SendFailed{3, Status::corrupt}), {"Send to 2: Fetch 4 from 1 at 2 1.0 v2"});
  EXPECT(b.step(Fetched{4, 2, 2, kA, 2, Status::ok, 4, 99}),
         {"Release payload 4", "Unrepairable 1.0 v2", "Send to 2: Update 5 from 1 at 2 replace 1.0 v2 on v0 (as is)"});
  // A new member may have the contents: all members are asked again.
  EXPECT(b.chain(3, {{1, kServing, 1}, {3, kSyncing, 1}}), {"Send to 3: PageAsk 6 from 1 at 3 after 0.0"});
}

void a_syncing_target_says_what_it_has() {
  Bench b(2);
  b.chain(3, {{1, kServing, 1}, {2, kServing, 1}});
  b.step(update(4, 4, 3, kA, 0, 2));
  b.sync();
  b.chain(4, {{1, kServing, 1}, {2, kSyncing, 1}});
  EXPECT(b.step(Fetch{5, 1, 4, kA, 2, false}), {"Send to 1: Fetched 5 from 2 at 4 1.0 v2 ok"});
  EXPECT(b.step(Fetch{6, 1, 4, kA, 3, false}), {"Send to 1: Fetched 6 from 2 at 4 1.0 v3 not_found"});
  EXPECT(b.step(Fetch{7, 1, 3, kA, 2, false}), {"Send to 1: Answer 7 from 2 at 3 stale_routing"});
}

void recovery_takes_damaged_contents_as_they_are_from_nobody_else() {
  Bench b = lone();
  b.chain(2, {{1, State::recovering, 1}, {2, kLast, 0}, {3, kLast, 0}});
  EXPECT(b.step(Page{2, 2, 2, {{kB, 6, 1, 77, 0, false}}, false, 4}), {"Send to 2: Fetch 3 from 1 at 2 2.0 v6"});
  EXPECT(b.step(Fetched{3, 2, 2, kB, 6, Status::corrupt, 0}), {"Send to 3: Fetch 4 from 1 at 2 2.0 v6"});
  EXPECT(b.step(Fetched{4, 3, 2, kB, 6, Status::ok, 5, 78}),
         {"Release payload 5", "Send to 2: Fetch 5 from 1 at 2 2.0 v6 as is"});
  EXPECT(b.step(Fetched{5, 2, 2, kB, 6, Status::ok, 6, 77}),
         {"Apply 6 replace 2.0 v6 on anything committed payload 6"});
}

void a_recovery_that_starts_over_waits_for_its_conclude() {
  Bench b(1);
  b.chain(2, {{1, State::recovering, 1}, {2, kLast, 0}});
  b.step(Page{1, 2, 2, {}, false, 1});
  EXPECT(b.step(Page{2, 2, 2, {}, false, 1}), {"Send to 2: TagsAsk 3 from 1 at 2"});
  EXPECT(b.step(Tags{3, 2, 2, 1, 9}), {"Conclude 4 floor 1 payload 9"});
  EXPECT(b.chain(3, {{1, State::recovering, 1}, {3, kLast, 0}}), {"Send to 3: PageAsk 5 from 1 at 3 after 0.0"});
  b.step(Page{5, 3, 3, {}, false, 1});
  EXPECT(b.step(Page{6, 3, 3, {}, false, 1}), {});
  EXPECT(b.sync(), {"Release payload 9", "Send to 3: TagsAsk 7 from 1 at 3"});
}

void what_was_under_way_before_a_sync_leaves_no_tag() {
  Bench b(2);
  b.chain(3, {{1, kServing, 1}, {2, kServing, 1}});
  b.step(update(4, 4, 3, kA, 0, 2));
  EXPECT(b.chain(4, {{1, kServing, 1}, {2, kSyncing, 1}}), {"Mark"});
  Update replace{5, 5, 1, 4, kB, 0, 2, Kind::replace, 0, 0, {6, 0, 1}, 9, false};
  EXPECT(b.step(replace), {"Send to 1: Answer 5 from 2 at 4 stale_routing", "Release payload 9"});
  EXPECT(b.sync(), {"Mark", "Release payload 8"});
  CHECK(b.step(replace).front().starts_with("Apply 2 replace 2.0 v2"));
}

void damage_without_a_copy_is_said() {
  Bench b = lone();
  b.store.spoil(kA, 2);
  EXPECT(b.step(Damaged{kA}), {"Unrepairable 1.0 v2"});
  EXPECT(b.step(write(2, 1, kA, 2)), {"Apply 2 write 1.0 v3 on v2 at 0+9 committed tag 5/0#2 payload 7"});
  EXPECT(b.sync(), {"Unrepairable 1.0 v2", "Reply 2 corrupt", "Release payload 7"});
}

// 3FS #345: the tail commits, crashes before its answer and comes back ahead of its predecessor.
void issue_345_a_tail_ahead_of_its_predecessor() {
  Bench head(1);
  head.chain(3, {{1, kServing, 1}, {2, kServing, 1}});
  head.step(write(1, 3, kA, 1));
  head.sync();  // v2 pending, sent; target 2 committed it and crashed
  EXPECT(
      head.chain(4, {{1, kServing, 1}, {2, kSyncing, 2}}),
      {"Send to 2: Update 3 from 1 at 4 replace 1.0 v2 on v0 tag 5/0#1", "Send to 2: PageAsk 4 from 1 at 4 after 0.0"});
  EXPECT(head.step(Answer{3, 2, 4, Status::ok}), {"Commit 1.0 v2", "Reply 1 ok v2 length 1", "Release payload 7"});
  const Entry mine = head.store.entry(kA);
  EXPECT(head.step(Page{4, 2, 4, {mine}, false, 1}), {"Send to 2: SyncDone 5 from 1 at 4 floor 1"});
}

// 3FS #229: a target with unexpected versions, here from a write that its chain dropped, hangs for ever.
void issue_229_a_version_of_another_life_is_replaced() {
  Bench b(2);
  b.chain(3, {{2, kServing, 1}, {1, kServing, 1}});
  b.step(write(1, 3, kA, 1));
  b.sync();  // v2 pending at the old head alone
  b.restart(2);
  EXPECT(b.chain(5, {{1, kServing, 1}, {2, kSyncing, 2}}), {"Mark"});
  CHECK(b.step(PageAsk{1, 1, 5, {}}).front() == "Send to 1: Page 1 from 2 at 5 floor 1 [1.0 v0+v2]");
  EXPECT(b.step(Update{2, 2, 1, 5, kA, 0, 1, Kind::remove, 0, 0, {}, 0, true}),
         {"Apply 1 remove 1.0 v1 on anything committed"});
  EXPECT(b.sync(), {"Send to 1: Answer 2 from 2 at 5 ok"});
  CHECK(b.store.entry(kA).pending == 0 && b.replica->busy_chunks() == 0);
}

// 3FS #335: a replaced, empty disk stays OFFLINE until an operator copies it by hand.
void issue_335_an_empty_disk_is_filled() {
  Bench head = lone(), empty(2);
  head.chain(2, {{1, kServing, 1}, {2, kSyncing, 1}});
  empty.chain(2, {{1, kServing, 1}, {2, kSyncing, 1}});
  EXPECT(empty.step(PageAsk{2, 1, 2, {}}), {"Send to 1: Page 2 from 2 at 2 floor 1 []"});
  EXPECT(head.step(Page{2, 2, 2, {}, false, 1}), {"Send to 2: Update 3 from 1 at 2 replace 1.0 v2 on v0"});
}

void a_restarted_server_sees_its_pending_versions_through() {
  Bench b(1);
  b.chain(3, {{1, kServing, 1}, {2, kServing, 1}});
  b.step(write(1, 3, kA, 1));
  b.sync();
  b.restart(2);
  EXPECT(
      b.chain(4, {{1, kServing, 2}, {2, kSyncing, 9}}),
      {"Send to 2: Update 1 from 1 at 4 replace 1.0 v2 on v0 tag 5/0#1", "Send to 2: PageAsk 2 from 1 at 4 after 0.0"});
  EXPECT(b.step(write(5, 4, kA, 1, 3)), {"Release payload 3"});  // the client's retry joins
  EXPECT(b.step(Answer{1, 2, 4, Status::ok}), {"Commit 1.0 v2", "Reply 5 ok v2 length 1"});
}

}  // namespace

int main() {
  head_applies_sends_commits_replies();
  refusals_at_the_door();
  a_tag_is_answered_once();
  a_lease_that_ends_answers_all();
  tail_commits_in_the_same_apply_and_drops_late_duplicates();
  a_low_version_is_new_where_another_chunk_was_removed();
  updates_of_others_and_gaps();
  no_space_behind_drops_the_version();
  a_refused_update_stays_refused();
  a_send_is_repeated_until_routing_changes();
  an_apply_under_way_while_a_target_begins_to_sync();
  a_removal_waits_for_creations_below_it();
  a_sync_sends_what_differs();
  a_syncing_target_takes_whatever_comes();
  recovery_takes_contents_then_removals_then_tags();
  a_syncing_target_takes_each_update_once();
  recovery_takes_the_number_of_a_removal_of_nothing();
  a_target_is_asked_only_after_its_last_apply();
  damage_is_fetched_from_another();
  a_disk_that_damages_all_it_is_given_is_given_up();
  a_disk_without_room_for_a_good_copy_is_full_not_damaged();
  what_the_syncing_target_has_is_fetched_not_replaced();
  a_damaged_version_that_nobody_else_has_is_dropped();
  a_damaged_write_that_went_nowhere_is_written_again();
  a_damaged_write_that_may_be_elsewhere_stays();
  a_version_of_another_life_is_no_good_copy();
  a_syncing_target_says_what_it_has();
  recovery_takes_damaged_contents_as_they_are_from_nobody_else();
  a_recovery_that_starts_over_waits_for_its_conclude();
  what_was_under_way_before_a_sync_leaves_no_tag();
  damage_without_a_copy_is_said();
  issue_345_a_tail_ahead_of_its_predecessor();
  issue_229_a_version_of_another_life_is_replaced();
  issue_335_an_empty_disk_is_filled();
  a_restarted_server_sees_its_pending_versions_through();
}
