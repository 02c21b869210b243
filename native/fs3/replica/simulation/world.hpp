// A chain of real replicas in one thread, for tests: stores in maps; a network that loses, duplicates and reorders;
// clients that retry; a manager that follows rules 1-7 of docs/internals/fs3-chain.md. The driver (explore_test.cpp)
// picks the next event.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "base/testing/check.hpp"
#include "fs3/replica/print.hpp"
#include "fs3/replica/replica.hpp"
#include "fs3/replica/simulation/map_store.hpp"

namespace ff::fs3::replica {

struct Chain {
  ChainVersion version = 1;
  std::vector<Member> members;
};

struct TargetReport {  // a target's report, and whether its node is alive
  bool alive = false;
  Incarnation incarnation = 0;
  LocalState local;
};

// Applies the rules until nothing changes. Returns the chain, whose version grows by one if anything changed.
inline Chain next_chain(const Chain& chain, const std::map<TargetId, TargetReport>& said, bool proceed) {
  Chain next = chain;
  std::vector<Member>& members = next.members;
  const auto count = [&](State state) {
    return std::count_if(members.begin(), members.end(), [&](const Member& m) { return m.state == state; });
  };
  const auto alive = [&](const Member& m) { return said.at(m.target).alive; };
  const auto faulty = [&](const Member& m) { return said.at(m.target).local.state == Local::faulty; };
  const auto order = [&] {
    std::stable_sort(members.begin(), members.end(),
                     [](const Member& a, const Member& b) { return a.state < b.state; });
  };
  const auto away = [&](const Member& m) { return alive(m) ? State::waiting : State::offline; };
  const auto uptodate = [&](const Member& m) {
    const TargetReport& s = said.at(m.target);
    return s.local.state == Local::uptodate && s.local.version == chain.version && s.incarnation == m.incarnation;
  };
  for (int pass = 0; pass < 8; ++pass) {
    std::vector<Member*> left;
    for (Member& m : members) {
      const bool works = m.state == State::serving || m.state == State::recovering || m.state == State::syncing;
      if (!works || (alive(m) && said.at(m.target).incarnation == m.incarnation && !faulty(m))) continue;
      if (m.state == State::serving) {
        left.push_back(&m);
        m.state = State::offline;
      } else {
        m.state = m.state == State::recovering ? State::lastsrv : away(m);
      }
    }
    const bool last = count(State::serving) == 0;
    for (Member* m : left) m->state = last ? State::lastsrv : away(*m);
    for (Member& m : members) {
      if ((m.state == State::recovering || m.state == State::syncing) && uptodate(m)) m.state = State::serving;
    }
    for (Member& m : members) {
      if (m.state == State::syncing && count(State::serving) == 0) m.state = away(m);
      if (!proceed || m.state != State::lastsrv || (alive(m) && !faulty(m))) continue;
      const auto good = std::count_if(members.begin(), members.end(), [&](const Member& o) {
        return (o.state == State::lastsrv && alive(o) && !faulty(o)) || o.state == State::recovering;
      });
      if (good > 0) m.state = State::offline;
    }
    order();
    if (count(State::serving) + count(State::recovering) == 0) {
      std::vector<Member*> ready;
      for (Member& m : members) {
        if (m.state == State::lastsrv && alive(m) && !faulty(m)) ready.push_back(&m);
      }
      if (!ready.empty() && static_cast<long>(ready.size()) == count(State::lastsrv)) {
        ready.front()->incarnation = said.at(ready.front()->target).incarnation;
        ready.front()->state = ready.size() == 1 ? State::serving : State::recovering;
      }
    }
    for (Member& m : members) {
      const bool waits = m.state == State::lastsrv || m.state == State::recovering;
      if (waits && count(State::serving) > 0) m.state = away(m);
      if (m.state == State::waiting && !alive(m)) m.state = State::offline;
      if (m.state == State::offline && alive(m)) m.state = State::waiting;
    }
    order();
    if (count(State::serving) > 0 && count(State::syncing) == 0) {
      for (Member& m : members) {
        if (m.state != State::waiting || !alive(m) || faulty(m)) continue;
        m.state = State::syncing;
        m.incarnation = said.at(m.target).incarnation;
        break;
      }
    }
    order();
  }
  const auto same = [](const Member& a, const Member& b) {
    return a.target == b.target && a.state == b.state && a.incarnation == b.incarnation;
  };
  if (!std::equal(members.begin(), members.end(), chain.members.begin(), same)) next.version = chain.version + 1;
  CHECK(count(State::syncing) <= 1);
  CHECK(count(State::serving) == 0 || count(State::lastsrv) + count(State::recovering) == 0);
  return next;
}

struct Bytes {  // the bytes behind a payload
  MapStore::Value value = 0;
  std::vector<Tagged> tags;
  bool bad = false;  // they fail their CRC
};

struct Packet {
  TargetId to = 0;
  Message message;
  Bytes bytes;
};

struct Node {
  MapStore store;
  std::unique_ptr<Replica> replica;  // null: crashed
  Incarnation incarnation = 0;
  bool lease = false;
  ChainVersion told = 0;
  std::map<Payload, Bytes> payloads;
  std::vector<Op> pauses;
};

struct Seen {  // an answer to a client's try
  Status status = Status::ok;
  MapStore::Value value = 0;  // of a read
  Version version = 0;
};

class World {
 public:
  World(std::size_t targets, Options options, bool transcript) : options_(options), transcript_(transcript) {
    for (TargetId id = 1; id <= targets; ++id) {
      chain.members.push_back({id, State::lastsrv, 0});
      nodes[id];
      start(id);
    }
  }

  Chain chain;
  std::map<TargetId, Node> nodes;
  std::vector<Packet> net;
  std::map<Op, Seen> answers;  // of client tries

  void say(const std::string& text) {
    if (transcript_) std::printf("%s\n", text.c_str());
  }

  void start(TargetId id) {
    Node& node = nodes.at(id);
    node.incarnation = ++incarnations_;
    node.replica = std::make_unique<Replica>(id, node.incarnation, node.store, options_);
    node.told = 0;
    say("target " + std::to_string(id) + " starts as " + std::to_string(node.incarnation));
    lease(id, true);
  }
  // Loses `lost` unsynced records; also `synced` whole syncs, on a disk that lied.
  void crash(TargetId id, std::size_t lost, std::size_t synced = 0) {
    Node& node = nodes.at(id);
    say("target " + std::to_string(id) + " crashes");
    node.store.power_cut(lost, synced);
    node.replica.reset();
    node.payloads.clear();
    node.pauses.clear();
    node.lease = false;
  }
  void lease(TargetId id, bool runs) {
    nodes.at(id).lease = runs;
    step(id, Lease{runs, chain.version});
  }
  void manage(bool proceed) {
    std::map<TargetId, TargetReport> said;
    for (auto& [id, node] : nodes) {
      said[id].alive = node.replica != nullptr && node.lease;
      said[id].incarnation = node.incarnation;
      if (node.replica) said[id].local = node.replica->local();
    }
    const Chain next = next_chain(chain, said, proceed);
    if (next.version == chain.version) return;
    chain = next;
    say("manager: " + to_string(Event{Routing{chain.version, chain.members}}));
  }
  void tell(TargetId id) {
    Node& node = nodes.at(id);
    if (!node.replica || node.told == chain.version) return;
    node.told = chain.version;
    step(id, Routing{chain.version, chain.members});
  }
  void sync(TargetId id) {
    if (!nodes.at(id).replica) return;
    for (const Applied& done : nodes.at(id).store.sync()) step(id, done);
  }
  void retry(TargetId id, std::size_t which) {
    Node& node = nodes.at(id);
    const Op op = node.pauses[which];
    node.pauses.erase(node.pauses.begin() + static_cast<long>(which));
    step(id, Retry{op});
  }
  void deliver(std::size_t which, bool stays) {
    Packet packet = net[which];
    if (!stays) net.erase(net.begin() + static_cast<long>(which));
    if (!nodes.at(packet.to).replica) {
      if (!stays) failed(packet);
      return;
    }
    Node& node = nodes.at(packet.to);
    std::visit(
        [&](auto& message) {
          if constexpr (requires { message.payload; }) {
            if (packet.bytes.value != 0 || !packet.bytes.tags.empty()) message.payload = payload(node, packet.bytes);
          }
          step(packet.to, message);
        },
        packet.message);
  }
  void lose(std::size_t which) {
    const Packet packet = net[which];
    net.erase(net.begin() + static_cast<long>(which));
    failed(packet);
  }

  void write(TargetId id, Op op, ChainVersion version, ChunkId chunk, Kind kind, Tag tag, MapStore::Value value) {
    Node& node = nodes.at(id);
    if (!node.replica) return;
    const Payload handle = kind == Kind::remove ? 0 : payload(node, {value, {}, false});
    step(id, ClientWrite{op, version, chunk, kind, 0, 1, tag, handle});
  }
  void read(TargetId id, Op op, ChainVersion version, ChunkId chunk) {
    if (nodes.at(id).replica) step(id, Read{op, version, chunk, false});
  }

  void step(TargetId id, const Event& event) {
    Node& node = nodes.at(id);
    if (!node.replica) return;
    if (transcript_) say(std::to_string(id) + " < " + to_string(event));
    Actions actions;
    node.replica->step(event, actions);
    std::vector<Event> after;
    for (const Action& action : actions) {
      if (transcript_) say("      " + std::to_string(id) + " > " + to_string(action));
      std::visit([&](const auto& a) { carry_out(id, node, a, after); }, action);
    }
    for (const Event& next : after) step(id, next);
  }

 private:
  Payload payload(Node& node, Bytes bytes) {
    node.payloads[++handles_] = std::move(bytes);
    return handles_;
  }
  MapStore::Value value(Node& node, Payload handle) {
    if (handle == 0) return 0;
    CHECK(node.payloads.contains(handle));
    return node.payloads.at(handle).value;
  }
  bool bad(Node& node, Payload handle) { return handle != 0 && node.payloads.at(handle).bad; }

  // Reports to the packet's sender that the packet will not be answered.
  void failed(const Packet& packet) {
    std::visit(
        [&](const auto& m) {
          using M = std::decay_t<decltype(m)>;
          constexpr bool asks = std::is_same_v<M, Update> || std::is_same_v<M, PageAsk> ||
                                std::is_same_v<M, SyncDone> || std::is_same_v<M, Fetch> || std::is_same_v<M, TagsAsk>;
          const TargetId asker = asks ? m.from : packet.to;
          const Node& node = nodes.at(asker);
          if (node.replica && node.replica->chain_version() == m.chain_version) step(asker, SendFailed{m.op});
        },
        packet.message);
  }

  void carry_out(TargetId, Node& node, const Apply& a, std::vector<Event>& after) {
    CHECK(a.version != 0 && a.chunk.inode != 0);
    for (const Applied& refused : node.store.apply(a, value(node, a.payload), bad(node, a.payload)))
      after.push_back(refused);
  }
  void carry_out(TargetId, Node& node, const Commit& c, std::vector<Event>&) { node.store.commit(c); }
  void carry_out(TargetId, Node& node, const Drop& d, std::vector<Event>&) { node.store.drop(d); }
  void carry_out(TargetId, Node& node, const Mark&, std::vector<Event>&) { node.store.mark(); }
  void carry_out(TargetId, Node& node, const Conclude& c, std::vector<Event>&) {
    node.store.conclude(c, c.payload != 0 ? node.payloads.at(c.payload).tags : std::vector<Tagged>{});
  }
  void carry_out(TargetId, Node& node, const Send& send, std::vector<Event>& after) {
    Packet packet{send.to, send.message, {}};
    if (auto* update = std::get_if<Update>(&packet.message)) {
      if (update->kind == Kind::replace) {
        CHECK(node.store.has(update->chunk, update->version));
        packet.bytes.bad = node.store.bad(update->chunk, update->version);
        if (packet.bytes.bad && !send.as_is) {
          after.push_back(SendFailed{update->op, Status::corrupt});
          return;
        }
        packet.bytes.value = node.store.value(update->chunk, update->version);
      } else {
        packet.bytes.value = value(node, update->payload);
      }
    } else if (auto* fetched = std::get_if<Fetched>(&packet.message)) {
      if (fetched->status == Status::ok) {
        CHECK(node.store.has(fetched->chunk, fetched->version));
        packet.bytes.bad = node.store.bad(fetched->chunk, fetched->version);
        if (packet.bytes.bad && !send.as_is) fetched->status = Status::corrupt;
        else packet.bytes.value = node.store.value(fetched->chunk, fetched->version);
      }
    } else if (std::holds_alternative<SyncDone>(packet.message)) {
      packet.bytes.tags = node.store.tags(false);
    } else if (std::holds_alternative<Tags>(packet.message)) {
      packet.bytes.tags = node.store.tags(true);
    }
    net.push_back(std::move(packet));
  }
  void carry_out(TargetId, Node&, const Reply& r, std::vector<Event>&) { answered(r.op, {r.status, 0, r.version}); }
  void carry_out(TargetId, Node& node, const ServeRead& r, std::vector<Event>&) {
    CHECK(node.store.has(r.chunk, r.version));
    const Status status = node.store.bad(r.chunk, r.version) ? Status::corrupt : Status::ok;
    answered(r.op, {status, node.store.value(r.chunk, r.version), r.version});
  }
  void carry_out(TargetId, Node& node, const Pause& p, std::vector<Event>&) { node.pauses.push_back(p.op); }
  void carry_out(TargetId, Node&, const LocalState&, std::vector<Event>&) {}
  void carry_out(TargetId, Node& node, const Release& r, std::vector<Event>&) {
    CHECK(node.payloads.erase(r.payload) == 1);
  }
  void carry_out(TargetId, Node&, const Unrepairable&, std::vector<Event>&) {}

  void answered(Op op, Seen seen) { CHECK(answers.emplace(op, seen).second); }

  Options options_;
  bool transcript_;
  Incarnation incarnations_ = 0;
  Payload handles_ = 0;
};

}  // namespace ff::fs3::replica
