// `fireflyer._native.fs3`: the shared types (types.hpp), and one submodule per folder, defined in
// native/fs3/<folder>/bind.cpp.
#include <nanobind/nanobind.h>
#include <nanobind/operators.h>
#include <nanobind/stl/string.h>

#include <functional>
#include <string>

#include "fs3/replica/store_lookup.hpp"
#include "fs3/types.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ff::fs3 {

void bind(nb::module_ m);

namespace client { void bind(nb::module_ m); }
namespace io { void bind(nb::module_ m); }
namespace mount { void bind(nb::module_ m); }
namespace replica { void bind(nb::module_ m); }
namespace store { void bind(nb::module_ m); }

namespace {

void bind_types(nb::module_ m) {
  nb::enum_<Kind>(m, "Kind", "Effect of a write on a chunk.")
      .value("write", Kind::write)
      .value("truncate", Kind::truncate)
      .value("extend", Kind::extend)
      .value("remove", Kind::remove)
      .value("replace", Kind::replace);
  nb::enum_<Status>(m, "Status", "Outcome of a request.")
      .value("ok", Status::ok)
      .value("stale_routing", Status::stale_routing)
      .value("duplicate", Status::duplicate)
      .value("diverged", Status::diverged)
      .value("corrupt", Status::corrupt)
      .value("no_space", Status::no_space)
      .value("io_error", Status::io_error)
      .value("not_found", Status::not_found)
      .value("invalid", Status::invalid);
  nb::class_<ChunkId>(m, "ChunkId", "Identifies a chunk. Ids are ordered by inode and index. Inode 0 has no chunks.")
      .def(
          "__init__", [](ChunkId* at, std::uint64_t inode, std::uint32_t index) { new (at) ChunkId{inode, index}; },
          "inode"_a, "index"_a = 0)
      .def_ro("inode", &ChunkId::inode)
      .def_ro("index", &ChunkId::index)
      .def(nb::self == nb::self, nb::sig("def __eq__(self, arg: object, /) -> bool"))
      .def(nb::self < nb::self)
      .def("__hash__", [](const ChunkId& id) { return std::hash<ChunkId>{}(id); })
      .def("__repr__", [](const ChunkId& id) { return std::to_string(id.inode) + "." + std::to_string(id.index); });
  nb::class_<Tag>(m, "Tag", "Idempotency key of a client's write while the client may retry it; client 0: none.")
      .def(
          "__init__",
          [](Tag* at, std::uint64_t client, std::uint32_t channel, std::uint64_t seq) {
            new (at) Tag{client, channel, seq};
          },
          "client"_a = 0, "channel"_a = 0, "seq"_a = 0)
      .def_ro("client", &Tag::client)
      .def_ro("channel", &Tag::channel)
      .def_ro("seq", &Tag::seq)
      .def(nb::self == nb::self, nb::sig("def __eq__(self, arg: object, /) -> bool"))
      .def(nb::self < nb::self)
      .def("__hash__", [](const Tag& tag) { return nb::hash(nb::make_tuple(tag.client, tag.channel, tag.seq)); })
      .def("__repr__", [](const Tag& tag) {
        return std::to_string(tag.client) + "/" + std::to_string(tag.channel) + "#" + std::to_string(tag.seq);
      });
}

}  // namespace

void bind(nb::module_ m) {
  bind_types(m);
  client::bind(m.def_submodule("client", "The client's engine"));
  io::bind(m.def_submodule("io", "The storage service"));
  mount::bind(m.def_submodule("mount", "The kernel's requests to a mounted directory"));
  replica::bind(m.def_submodule("replica", "The replica's state machine, for simulations and tests"));
  store::bind(m.def_submodule("store", "Chunk stores on real and simulated disks"));
  nb::class_<replica::StoreLookup, replica::Lookup>(m, "StoreLookup",
                                                    "A replica's queries to a chunk store, which stays open.")
      .def(
          "__init__", [](replica::StoreLookup* at, const store::Store& core) { new (at) replica::StoreLookup(core); },
          "core"_a, nb::keep_alive<1, 2>());
}

}  // namespace ff::fs3
