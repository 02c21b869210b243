// Random histories of small chains: 1-3 targets, 1-2 clients, one or two chunks. Faults: messages lost, duplicated and
// reordered, crashes, power cuts, a lying disk, expiring leases. Each history must be linearizable per chunk, and after
// the faults stop all targets serve the same contents.
//   explore_test [histories] [first seed]; for a single history it prints the transcript.
#include <cinttypes>
#include <cstdlib>
#include <cstring>
#include <unordered_set>

#include "fs3/replica/simulation/world.hpp"

using namespace ff::fs3;
using namespace ff::fs3::replica;

namespace {

struct Operation {  // an operation of a client on a chunk
  bool reads = false;
  Kind kind = Kind::write;
  MapStore::Value value = 0;  // written, or read (0: nothing there)
  int begun = 0;
  int ended = 1 << 30;  // initially never: it may have happened at any time since, or not at all
};

// Returns whether some order of the operations respects their times and explains the values read.
class Linearizable {
 public:
  explicit Linearizable(const std::vector<Operation>& operations) : operations_(operations) {
    CHECK(operations.size() <= 64);
  }
  bool check() { return search(0, 0); }

 private:
  bool search(std::uint64_t done, MapStore::Value state) {
    int first_end = 1 << 30;
    bool all = true;
    for (std::size_t i = 0; i < operations_.size(); ++i) {
      if ((done >> i & 1) != 0) continue;
      first_end = std::min(first_end, operations_[i].ended);
      all = all && operations_[i].ended == 1 << 30;
    }
    if (all) return true;
    if (!seen_.insert(done * 0x9e3779b97f4a7c15ull ^ state).second) return false;
    for (std::size_t i = 0; i < operations_.size(); ++i) {
      const Operation& o = operations_[i];
      if ((done >> i & 1) != 0 || o.begun > first_end) continue;
      if (o.reads && o.value != state) continue;
      MapStore::Value next = state;
      if (!o.reads) next = o.kind == Kind::remove ? 0 : MapStore::combine(state, o.value);
      if (search(done | std::uint64_t{1} << i, next)) return true;
    }
    return false;
  }

  const std::vector<Operation>& operations_;
  std::unordered_set<std::uint64_t> seen_;
};

struct Client {
  std::uint64_t id = 0;
  std::uint64_t seq = 0;
  bool busy = false;
  std::size_t chunk = 0;
  std::size_t operation = 0;  // index in histories[chunk]
  std::vector<Op> tries;
};

class Exploration {
 public:
  Exploration(std::uint64_t seed, bool transcript)
      : random_(seed),
        targets_(1 + pick(3)),
        world_(targets_, {1 + pick(3), 1 + pick(2)}, transcript),
        histories_(1 + pick(2)),
        lies_(chance(4)),
        fills_(chance(4)),
        spoils_(chance(3)) {
    clients_.resize(1 + pick(2));
    for (std::size_t i = 0; i < clients_.size(); ++i) clients_[i].id = i + 1;
  }

  bool run() {
    settle();
    const std::size_t steps = 60 + pick(240);
    for (std::size_t i = 0; i < steps; ++i) {
      ++time_;
      random_step();
    }
    calm();
    bool good = true;
    for (const auto& history : histories_) good = good && Linearizable(history).check();
    return good;
  }

  void print() const {
    for (std::size_t c = 0; c < histories_.size(); ++c) {
      for (const Operation& o : histories_[c]) {
        std::printf("chunk %zu: %s %016" PRIx64 " from %d to %d\n", c, o.reads ? "read" : name(o.kind), o.value,
                    o.begun, o.ended);
      }
    }
  }

 private:
  std::size_t pick(std::size_t n) { return static_cast<std::size_t>(random_() % n); }
  bool chance(std::size_t n) { return pick(n) == 0; }
  ChunkId id_of(std::size_t chunk) const { return {1 + chunk, 0}; }

  void random_step() {
    switch (pick(20)) {
      case 0:
      case 1:
      case 2:
      case 3:
      case 4:
      case 5:
      case 6:
        if (!world_.net.empty()) {
          const std::size_t which = pick(world_.net.size());
          if (chance(20)) world_.lose(which);
          else world_.deliver(which, world_.net.size() < 40 && chance(8));
        }
        break;
      case 7:
      case 8:
      case 9: world_.sync(target()); break;
      case 10:
      case 11: client_step(clients_[pick(clients_.size())]); break;
      case 12:
      case 13: collect(); break;
      case 14:
        world_.manage(!lied_ && chance(8));
        note_health();
        break;
      case 15:
      case 16: world_.tell(target()); break;
      case 17: retry(target()); break;
      case 18:
        if (chance(3)) fault();
        break;
      default: mend(); break;
    }
    collect();
  }

  TargetId target() { return static_cast<TargetId>(1 + pick(targets_)); }
  Node& node(TargetId id) { return world_.nodes.at(id); }

  void retry(TargetId id) {
    if (node(id).replica && !node(id).pauses.empty()) world_.retry(id, pick(node(id).pauses.size()));
  }

  void fault() {
    const TargetId id = target();
    switch (pick(6)) {
      case 0: crash(id, 0); break;
      case 1:
        if (node(id).replica && node(id).lease) world_.lease(id, false);
        break;
      case 2:
        if (fills_) node(id).store.fill(true);
        break;
      case 3:
        if (spoils_ && healthy() && !lied_ && targets_ > 1 && !spoiled_) {
          const ChunkId chunk = id_of(pick(histories_.size()));
          if (node(id).store.entry(chunk).committed == 0) break;
          spoiled_ = true;
          node(id).store.spoil(chunk, node(id).store.entry(chunk).committed);
        }
        break;
      case 4:
        if (spoils_ && !lied_ && !spoiled_) spoil_pending(id);
        break;
      default: {  // crashes all targets; once, the disk of one of them lies
        const bool lie = lies_ && healthy() && targets_ > 1 && !spoiled_;
        lied_ = lied_ || lie;
        if (lie) lies_ = false;
        for (TargetId t = 1; t <= targets_; ++t) crash(t, lie && t == id ? 1 + pick(3) : 0);
      }
    }
  }

  // Damages a pending version that another target has intact.
  void spoil_pending(TargetId id) {
    for (std::size_t n = 0; n < histories_.size(); ++n) {
      const Entry mine = node(id).store.entry(id_of(n));
      for (TargetId other = 1; other <= targets_ && mine.pending != 0 && !mine.removes && !spoiled_; ++other) {
        const MapStore& its = node(other).store;
        if (other == id || !its.has(id_of(n), mine.pending)) continue;
        spoiled_ = its.value(id_of(n), mine.pending) == node(id).store.value(id_of(n), mine.pending);
        if (spoiled_) node(id).store.spoil(id_of(n), mine.pending);
      }
    }
  }

  void crash(TargetId id, std::size_t synced) {
    if (node(id).replica) world_.crash(id, pick(node(id).store.unsynced() + 1), synced);
  }

  void mend() {
    const TargetId id = target();
    if (!node(id).replica) world_.start(id);
    else if (!node(id).lease) world_.lease(id, true);
    else if (node(id).replica->local().state == Local::faulty && chance(8)) crash(id, 0);
    else if (chance(2)) node(id).store.fill(false);
  }

  bool healthy() const {
    return std::all_of(world_.chain.members.begin(), world_.chain.members.end(),
                       [&](const Member& m) { return m.state == State::serving && world_.nodes.at(m.target).replica; });
  }
  void note_health() {
    if (healthy()) lied_ = false;
  }

  // ---- Clients

  void client_step(Client& client) {
    if (!client.busy) {
      begin(client, pick(histories_.size()), chance(2), chance(4) ? Kind::remove : Kind::write);
    } else if (chance(3)) {
      attempt(client);
    }
  }

  void begin(Client& client, std::size_t chunk, bool reads, Kind kind) {
    if (histories_[chunk].size() >= 40) return;
    client.busy = true;
    client.chunk = chunk;
    client.operation = histories_[chunk].size();
    client.tries.clear();
    if (!reads) ++client.seq;
    histories_[chunk].push_back({reads, kind, reads ? 0 : client.id * 1000 + client.seq, time_});
    attempt(client);
  }

  void attempt(Client& client) {
    const Operation& operation = histories_[client.chunk][client.operation];
    const Op op = ++op_;
    client.tries.push_back(op);
    std::vector<TargetId> serving;
    for (const Member& m : world_.chain.members) {
      if (m.state == State::serving) serving.push_back(m.target);
    }
    if (serving.empty()) return;
    const ChainVersion version = world_.chain.version - (chance(8) ? 1 : 0);
    if (operation.reads) {
      world_.read(chance(6) ? target() : serving[pick(serving.size())], op, version, id_of(client.chunk));
      return;
    }
    const TargetId to = chance(6) ? target() : serving.front();
    const Tag tag{client.id, 0, client.seq};
    for (int i = chance(6) ? 2 : 1; i > 0; --i) {  // the network may duplicate it
      world_.write(to, i == 1 ? op : ++op_, version, id_of(client.chunk), operation.kind, tag, operation.value);
    }
  }

  void collect() {
    for (Client& client : clients_) {
      if (!client.busy) continue;
      Operation& operation = histories_[client.chunk][client.operation];
      for (const Op op : client.tries) {
        const auto found = world_.answers.find(op);
        if (found == world_.answers.end()) continue;
        const Seen seen = found->second;
        if (seen.status == Status::stale_routing) continue;
        CHECK(seen.status != Status::diverged && seen.status != Status::duplicate);
        const bool answered = seen.status == Status::ok || seen.status == Status::not_found;
        if (answered) {
          operation.ended = time_;
          if (operation.reads) operation.value = seen.status == Status::ok ? seen.value : 0;
        } else if (operation.reads) {
          continue;  // corrupt: try again
        }
        client.busy = false;
        break;
      }
    }
    ++time_;
  }

  // ---- The end: faults stop

  void settle() {
    for (int round = 0; round < 400; ++round) {
      world_.manage(round > 60);  // the recovery wait is over
      note_health();
      for (TargetId id = 1; id <= targets_; ++id) {
        world_.tell(id);
        world_.sync(id);
        while (!node(id).pauses.empty()) world_.retry(id, 0);
      }
      while (!world_.net.empty()) world_.deliver(pick(world_.net.size()), false);
      collect();
      if (quiet()) return;
    }
  }

  bool quiet() const {
    return healthy() && world_.net.empty() && std::all_of(world_.nodes.begin(), world_.nodes.end(), [&](const auto& n) {
             return n.second.told == world_.chain.version && n.second.store.unsynced() == 0 && n.second.pauses.empty();
           });
  }

  void calm() {
    for (TargetId id = 1; id <= targets_; ++id) {
      node(id).store.fill(false);
      if (!node(id).replica) world_.start(id);
      if (!node(id).lease) world_.lease(id, true);
    }
    settle();
    for (Client& client : clients_) {
      for (int i = 0; client.busy && i < 60; ++i) {
        attempt(client);
        settle_a_little();
      }
      CHECK(!client.busy);
    }
    CHECK(healthy());
    for (std::size_t chunk = 0; chunk < histories_.size(); ++chunk) {
      for (TargetId id = 1; id <= targets_; ++id) {
        const Op op = ++op_;
        Operation read{true, Kind::write, 0, ++time_};
        world_.read(id, op, world_.chain.version, id_of(chunk));
        const Seen seen = world_.answers.at(op);
        CHECK(seen.status == Status::not_found || seen.status == Status::ok ||
              (seen.status == Status::corrupt && spoiled_));
        if (seen.status == Status::corrupt) {
          world_.step(id, Damaged{id_of(chunk)});
          settle_a_little();
          CHECK(!node(id).store.bad(id_of(chunk), node(id).store.entry(id_of(chunk)).committed));
          continue;
        }
        read.value = seen.status == Status::ok ? seen.value : 0;
        read.ended = ++time_;
        histories_[chunk].push_back(read);
        const Entry mine = node(id).store.entry(id_of(chunk)), first = node(1).store.entry(id_of(chunk));
        CHECK(mine.pending == 0 && mine.committed == first.committed && mine.crc == first.crc);
      }
    }
    for (auto& [id, n] : world_.nodes) {
      CHECK(n.replica->busy_chunks() == 0 && n.replica->outstanding() == 0 && n.payloads.empty());
      CHECK(n.store.complete());
      // No replica has failed.
      CHECK(n.replica->local().state != Local::faulty);
    }
  }

  void settle_a_little() {
    for (int round = 0; round < 30 && (round < 2 || !quiet()); ++round) {
      for (TargetId id = 1; id <= targets_; ++id) {
        world_.sync(id);
        while (!node(id).pauses.empty()) world_.retry(id, 0);
      }
      while (!world_.net.empty()) world_.deliver(0, false);
      collect();
    }
  }

  std::mt19937_64 random_;
  std::size_t targets_;
  World world_;
  std::vector<std::vector<Operation>> histories_;
  std::vector<Client> clients_;
  bool lies_, fills_, spoils_;
  bool lied_ = false;  // a store lost durable data, and not all stores have been compared since
  bool spoiled_ = false;
  int time_ = 0;
  Op op_ = 0;
};

std::uint64_t current = 0;

void say_seed(int) { std::fprintf(stderr, "explore_test: failed at seed %" PRIu64 "\n", current); }

}  // namespace

#include <csignal>

#include "base/testing/one_thread.hpp"

int main(int argc, char** argv) {
  const std::uint64_t histories = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 3000;
  const std::uint64_t first = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  std::signal(SIGABRT, say_seed);
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  for (current = first; current < first + histories; ++current) {
    Exploration exploration(current, histories == 1);
    if (exploration.run()) continue;
    exploration.print();
    std::fprintf(stderr, "explore_test: seed %" PRIu64 " is not linearizable\n", current);
    return 1;
  }
  std::printf("%" PRIu64 " histories\n", histories);
  return 0;
}
