// Python binding of the replica: `fireflyer._native.fs3.replica`. Every call is short and keeps the GIL.
#include "fs3/replica/replica.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fs3/replica/print.hpp"
#include "fs3/replica/simulation/map_store.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ff::fs3::replica {

void bind(nb::module_ m);

namespace {

using Machine = nb::class_<Replica>;

// A store implemented in Python. An exception of one of its methods leaves step(); the replica must not be used
// afterwards.
class ObjectLookup final : public Lookup {
 public:
  explicit ObjectLookup(nb::object store) : store_(std::move(store)) {}

  Entry entry(ChunkId chunk) const override { return nb::cast<Entry>(store_.attr("entry")(chunk)); }
  void page(ChunkId after, std::size_t limit, std::vector<Entry>& to) const override {
    for (const nb::handle entry : store_.attr("page")(after, limit)) to.push_back(nb::cast<Entry>(entry));
  }
  Tagged tag(std::uint64_t client, std::uint32_t channel) const override {
    const nb::object found = store_.attr("tag")(client, channel);
    return found.is_none() ? Tagged{} : nb::cast<Tagged>(found);
  }
  Version floor() const override { return nb::cast<Version>(store_.attr("floor")()); }
  bool complete() const override { return nb::cast<bool>(store_.attr("complete")()); }
  std::vector<Pending> pendings() const override { return nb::cast<std::vector<Pending>>(store_.attr("pendings")()); }

 private:
  nb::object store_;
};

// Binds the class of an event and the overload of Replica.step() that takes it.
template <class E>
nb::class_<E> event(nb::module_ m, Machine& machine, const char* called) {
  machine.def(
      "step",
      [](Replica& replica, const E& e) {
        Actions actions;
        replica.step(e, actions);
        return actions;
      },
      "event"_a);
  return nb::class_<E>(m, called).def("__repr__", [](const E& e) { return to_string(Event{e}); });
}

template <class M>
nb::class_<M> message(nb::module_ m, Machine& machine, const char* called) {
  return event<M>(m, machine, called)
      .def_ro("op", &M::op)
      .def_ro("from_target", &M::from)
      .def_ro("chain_version", &M::chain_version);
}

template <class A>
nb::class_<A> action(nb::module_ m, const char* called) {
  return nb::class_<A>(m, called).def("__repr__", [](const A& a) { return to_string(Action{a}); });
}

void bind_values(nb::module_ m) {
  nb::enum_<State>(m, "State", "State of a chain's member. Members are ordered by state.")
      .value("serving", State::serving)
      .value("recovering", State::recovering)
      .value("lastsrv", State::lastsrv)
      .value("syncing", State::syncing)
      .value("waiting", State::waiting)
      .value("offline", State::offline);
  nb::enum_<Local>(m, "Local", "State that a target reports of itself.")
      .value("online", Local::online)
      .value("uptodate", Local::uptodate)
      .value("faulty", Local::faulty);
  nb::class_<Member>(m, "Member")
      .def(
          "__init__",
          [](Member* at, TargetId target, State state, Incarnation incarnation) {
            new (at) Member{target, state, incarnation};
          },
          "target"_a, "state"_a, "incarnation"_a = 0)
      .def_ro("target", &Member::target)
      .def_ro("state", &Member::state)
      .def_ro("incarnation", &Member::incarnation);
  nb::class_<Entry>(m, "Entry", "State of a chunk in an index or a page; version 0: none.")
      .def(
          "__init__",
          [](Entry* at, const ChunkId& chunk, Version committed, std::uint32_t length, std::uint32_t crc,
             Version pending, bool removes, std::uint32_t pending_crc) {
            new (at) Entry{chunk, committed, length, crc, pending, removes, pending_crc};
          },
          "chunk"_a, "committed"_a = 0, "length"_a = 0, "crc"_a = 0, "pending"_a = 0, "removes"_a = false,
          "pending_crc"_a = 0)
      .def_ro("chunk", &Entry::chunk)
      .def_ro("committed", &Entry::committed)
      .def_ro("length", &Entry::length)
      .def_ro("crc", &Entry::crc)
      .def_ro("pending", &Entry::pending)
      .def_ro("removes", &Entry::removes);
  nb::class_<Pending>(m, "Pending", "A pending version; `length`: the chunk's length in that version.")
      .def(
          "__init__",
          [](Pending* at, const ChunkId& chunk, Version version, std::uint32_t length, bool removes, const Tag& tag) {
            new (at) Pending{chunk, version, length, removes, tag};
          },
          "chunk"_a, "version"_a, "length"_a, "removes"_a, "tag"_a = Tag{});
  nb::class_<Tagged>(m, "Tagged", "The newest write of a channel; version 0: the write did not happen.")
      .def(
          "__init__",
          [](Tagged* at, const Tag& tag, const ChunkId& chunk, Version version) {
            new (at) Tagged{tag, chunk, version};
          },
          "tag"_a, "chunk"_a, "version"_a)
      .def_ro("tag", &Tagged::tag)
      .def_ro("chunk", &Tagged::chunk)
      .def_ro("version", &Tagged::version);
}

void bind_events(nb::module_ m, Machine& r) {
  event<Applied>(m, r, "Applied")
      .def(
          "__init__",
          [](Applied* at, Op op, Status status, std::uint32_t length) { new (at) Applied{op, status, length}; }, "op"_a,
          "status"_a = Status::ok, "length"_a = 0)
      .def_ro("op", &Applied::op)
      .def_ro("status", &Applied::status)
      .def_ro("length", &Applied::length);
  message<Update>(m, r, "Update")
      .def_ro("settled", &Update::settled)
      .def_ro("chunk", &Update::chunk)
      .def_ro("base", &Update::base)
      .def_ro("version", &Update::version)
      .def_ro("kind", &Update::kind)
      .def_ro("offset", &Update::offset)
      .def_ro("length", &Update::length)
      .def_ro("tag", &Update::tag)
      .def_rw("payload", &Update::payload)
      .def_ro("forget", &Update::forget);
  message<Answer>(m, r, "Answer").def_ro("status", &Answer::status);
  event<ClientWrite>(m, r, "ClientWrite")
      .def(
          "__init__",
          [](ClientWrite* at, Op op, ChainVersion chain_version, const ChunkId& chunk, Kind kind, std::uint32_t offset,
             std::uint32_t length, const Tag& tag,
             Payload payload) { new (at) ClientWrite{op, chain_version, chunk, kind, offset, length, tag, payload}; },
          "op"_a, "chain_version"_a, "chunk"_a, "kind"_a, "offset"_a = 0, "length"_a = 0, "tag"_a = Tag{},
          "payload"_a = 0);
  event<Read>(m, r, "Read")
      .def(
          "__init__",
          [](Read* at, Op op, ChainVersion chain_version, const ChunkId& chunk, bool allow_uncommitted) {
            new (at) Read{op, chain_version, chunk, allow_uncommitted};
          },
          "op"_a, "chain_version"_a, "chunk"_a, "allow_uncommitted"_a = false);
  event<SendFailed>(m, r, "SendFailed")
      .def(
          "__init__", [](SendFailed* at, Op op, Status status) { new (at) SendFailed{op, status}; }, "op"_a,
          "status"_a = Status::io_error);
  event<Retry>(m, r, "Retry").def("__init__", [](Retry* at, Op op) { new (at) Retry{op}; }, "op"_a);
  event<Damaged>(m, r, "Damaged")
      .def("__init__", [](Damaged* at, const ChunkId& chunk) { new (at) Damaged{chunk}; }, "chunk"_a);
  event<Lease>(m, r, "Lease")
      .def(
          "__init__", [](Lease* at, bool runs, ChainVersion version) { new (at) Lease{runs, version}; }, "runs"_a,
          "version"_a = 0);
  event<Routing>(m, r, "Routing")
      .def(
          "__init__",
          [](Routing* at, ChainVersion version, std::vector<Member> members) {
            new (at) Routing{version, std::move(members)};
          },
          "version"_a, "members"_a);
  message<PageAsk>(m, r, "PageAsk").def_ro("after", &PageAsk::after);
  message<Page>(m, r, "Page")
      .def_ro("entries", &Page::entries)
      .def_ro("more", &Page::more)
      .def_ro("floor", &Page::floor);
  message<SyncDone>(m, r, "SyncDone").def_ro("floor", &SyncDone::floor).def_rw("payload", &SyncDone::payload);
  message<Fetch>(m, r, "Fetch")
      .def_ro("chunk", &Fetch::chunk)
      .def_ro("version", &Fetch::version)
      .def_ro("as_is", &Fetch::as_is);
  message<Fetched>(m, r, "Fetched")
      .def_ro("chunk", &Fetched::chunk)
      .def_ro("version", &Fetched::version)
      .def_rw("status", &Fetched::status)
      .def_rw("payload", &Fetched::payload);
  message<TagsAsk>(m, r, "TagsAsk");
  message<Tags>(m, r, "Tags").def_ro("floor", &Tags::floor).def_rw("payload", &Tags::payload);
}

void bind_actions(nb::module_ m) {
  action<Apply>(m, "Apply")
      .def_ro("op", &Apply::op)
      .def_ro("chunk", &Apply::chunk)
      .def_ro("base", &Apply::base)
      .def_ro("version", &Apply::version)
      .def_ro("chain_version", &Apply::chain_version)
      .def_ro("kind", &Apply::kind)
      .def_ro("committed", &Apply::committed)
      .def_ro("any_base", &Apply::any_base)
      .def_ro("offset", &Apply::offset)
      .def_ro("length", &Apply::length)
      .def_ro("tag", &Apply::tag)
      .def_ro("payload", &Apply::payload);
  action<Commit>(m, "Commit").def_ro("chunk", &Commit::chunk).def_ro("version", &Commit::version);
  action<Drop>(m, "Drop").def_ro("op", &Drop::op).def_ro("chunk", &Drop::chunk).def_ro("version", &Drop::version);
  action<Mark>(m, "Mark");
  action<Conclude>(m, "Conclude")
      .def_ro("op", &Conclude::op)
      .def_ro("floor", &Conclude::floor)
      .def_ro("payload", &Conclude::payload);
  action<Send>(m, "Send")
      .def_ro("to", &Send::to)
      .def_prop_ro(
          "message", [](const Send& send) { return send.message; },
          "A copy of the message, which is an event of the receiver.")
      .def_ro("as_is", &Send::as_is);
  action<Reply>(m, "Reply")
      .def_ro("op", &Reply::op)
      .def_ro("status", &Reply::status)
      .def_ro("version", &Reply::version)
      .def_ro("length", &Reply::length);
  action<ServeRead>(m, "ServeRead")
      .def_ro("op", &ServeRead::op)
      .def_ro("chunk", &ServeRead::chunk)
      .def_ro("version", &ServeRead::version);
  action<Pause>(m, "Pause").def_ro("op", &Pause::op);
  action<LocalState>(m, "LocalState").def_ro("state", &LocalState::state).def_ro("version", &LocalState::version);
  action<Release>(m, "Release").def_ro("payload", &Release::payload);
  action<Unrepairable>(m, "Unrepairable")
      .def_ro("chunk", &Unrepairable::chunk)
      .def_ro("version", &Unrepairable::version);
}

void bind_lookups(nb::module_ m) {
  nb::class_<Lookup>(m, "Lookup", "A replica's queries to its target's store.");
  nb::class_<ObjectLookup, Lookup>(m, "ObjectLookup",
                                   "Queries an object with entry(chunk) -> Entry, page(after, limit) -> list[Entry], "
                                   "tag(client, channel) -> Tagged | None, floor() -> int, complete() -> bool and "
                                   "pendings() -> list[Pending].")
      .def(
          "__init__", [](ObjectLookup* at, nb::object store) { new (at) ObjectLookup(std::move(store)); }, "store"_a,
          nb::sig("def __init__(self, store: object) -> None"));
  nb::class_<MapStore, Lookup>(m, "MapStore", "A store whose chunks hold one number each; for tests.")
      .def(nb::init<>())
      .def("apply", &MapStore::apply, "action"_a, "written"_a = 0, "bad"_a = false,
           "Returns an Applied if refused, else []; sync() then has the outcome.")
      .def("commit", &MapStore::commit, "action"_a)
      .def("drop", &MapStore::drop, "action"_a)
      .def("mark", &MapStore::mark)
      .def("conclude", &MapStore::conclude, "action"_a, "tags"_a)
      .def("sync", &MapStore::sync, "Makes all changes durable; returns their outcomes.")
      .def("entry", &MapStore::entry, "chunk"_a)
      .def("tags", &MapStore::tags, "pending_as_they_are"_a);
}

}  // namespace

void bind(nb::module_ m) {
  m.doc() = "The CRAQ replica of a target (docs/internals/fs3-chain.md): step(event) -> actions.";
  bind_values(m);
  bind_lookups(m);
  Machine machine(m, "Replica",
                  "Replica of one target in its chain. It handles no bytes: payloads are numbers of the caller.");
  bind_actions(m);
  bind_events(m, machine);
  machine
      .def(
          "__init__",
          [](Replica* at, TargetId target, Incarnation incarnation, const Lookup& lookup, std::size_t page,
             std::size_t window) { new (at) Replica(target, incarnation, lookup, {page, window}); },
          "target"_a, "incarnation"_a, "lookup"_a, "page"_a = 256, "window"_a = 8, nb::keep_alive<1, 4>())
      .def_prop_ro("target", &Replica::target)
      .def_prop_ro("incarnation", &Replica::incarnation)
      .def_prop_ro("local", &Replica::local, "The last LocalState.")
      .def_prop_ro("role", &Replica::role, "State in the chain; offline if the replica must not act in it.")
      .def_prop_ro("busy_chunks", &Replica::busy_chunks,
                   "Number of chunks with jobs, pending versions or waiting reads.")
      .def_prop_ro("outstanding", &Replica::outstanding, "Number of awaited answers to Sends, Applies and Drops.");
}

}  // namespace ff::fs3::replica
