// `fireflyer._native.fs3.store`: chunk stores for simulations and tests. Calls take and return plain ints, bytes and
// tuples; a chunk is (inode, index), CRC32Cs are bytes of little-endian u32.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <optional>
#include <string>

#include "base/error.hpp"
#include "fs3/store/disk/directory_disk.hpp"
#include "fs3/store/disk/sim_disk.hpp"
#include "fs3/store/store.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ff::fs3::store {

void bind(nb::module_ m);

namespace {

class View {
 public:
  explicit View(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_C_CONTIGUOUS) != 0) throw nb::python_error();
  }
  ~View() { PyBuffer_Release(&view_); }
  View(const View&) = delete;
  View& operator=(const View&) = delete;
  template <class T>
  std::span<const T> as() const {
    return {static_cast<const T*>(view_.buf), static_cast<std::size_t>(view_.len) / sizeof(T)};
  }

 private:
  Py_buffer view_{};
};

int number(Status status) { return static_cast<int>(status); }

nb::tuple row(const Entry& e) {
  const VersionInfo &c = e.committed, &p = e.pending;
  return nb::make_tuple(e.chunk.inode, e.chunk.index, c.version, c.chain_version, c.length, c.crc, p.version,
                        p.chain_version, p.length, p.crc, p.remove);
}

nb::tuple row(const Tagged& t) {
  return nb::make_tuple(t.tag.client, t.tag.channel, t.tag.seq, t.chunk.inode, t.chunk.index, t.version, t.length);
}

// A store that can be closed. Calls on a real disk release the GIL; calls on a simulated one are too short for that.
class PyStore {
 public:
  PyStore(Disk& disk, std::uint32_t target, std::uint32_t chain, std::uint64_t log_bytes, std::uint64_t reserve_bytes)
      : real_(dynamic_cast<DirectoryDisk*>(&disk) != nullptr) {
    const GilRelease gil(real_);
    store_ = std::make_unique<Store>(
        Store::open(disk, {target, chain}, {.log_bytes = log_bytes, .reserve_bytes = reserve_bytes}));
  }
  Store& get() const {
    if (!store_) throw Error(Code::invalid, "the store is closed");
    return *store_;
  }
  void close() { store_.reset(); }

  int apply(std::uint64_t op, std::uint64_t inode, std::uint32_t index, Version base, Version version,
            ChainVersion chain_version, int kind, std::uint32_t offset, std::uint32_t length, nb::handle data,
            nb::handle crcs, bool committed, std::uint64_t client, std::uint32_t channel, std::uint64_t seq) {
    if (kind < 0 || kind > static_cast<int>(Kind::replace)) return number(Status::invalid);
    const View bytes(data), given(crcs);
    const Apply apply{.chunk = {inode, index},
                      .base = base,
                      .version = version,
                      .chain_version = chain_version,
                      .kind = static_cast<Kind>(kind),
                      .committed = committed,
                      .offset = offset,
                      .length = length,
                      .bytes = bytes.as<std::byte>(),
                      .crcs = given.as<std::uint32_t>(),
                      .tag = {client, channel, seq}};
    Store& store = get();
    const GilRelease gil(real_);
    return number(store.apply(op, apply));
  }
  nb::list sync() {
    std::vector<Done> done;
    {
      Store& store = get();
      const GilRelease gil(real_);
      done = store.sync();
    }
    nb::list list;
    for (const Done& d : done) list.append(nb::make_tuple(d.op, number(d.status), d.version, d.length, d.crc));
    return list;
  }
  nb::tuple read(std::uint64_t inode, std::uint32_t index, Version version, std::uint32_t offset,
                 std::uint32_t length) {
    Reading r;
    {
      Store& store = get();
      const GilRelease gil(real_);
      r = store.read({inode, index}, version, offset, length);
    }
    const bool ok = r.status == Status::ok;
    const nb::object bytes = nb::steal(PyBytes_FromStringAndSize(nullptr, ok ? r.length : 0));
    if (!bytes.is_valid()) throw nb::python_error();
    char* const to = PyBytes_AS_STRING(bytes.ptr());
    if (ok) {
      const GilRelease gil(real_);
      r.status = r.copy(to);
    }
    const auto* const crcs = reinterpret_cast<const char*>(r.crcs.data());
    return nb::make_tuple(number(r.status), r.version, r.chunk_length, r.offset, bytes,
                          nb::bytes(crcs, 4 * r.crcs.size()));
  }
  int check(std::uint64_t inode, std::uint32_t index) {
    Store& store = get();
    const GilRelease gil(real_);
    return number(store.check({inode, index}));
  }
  int snapshot() {
    Store& store = get();
    const GilRelease gil(real_);
    return number(store.snapshot());
  }

 private:
  class GilRelease {  // releases the GIL if the disk is real
   public:
    explicit GilRelease(bool real) {
      if (real) released_.emplace();
    }

   private:
    std::optional<nb::gil_scoped_release> released_;
  };
  bool real_;
  std::unique_ptr<Store> store_;
};

void bind_disks(nb::module_& m) {
  nb::class_<Disk>(m, "Disk", "Storage of a Store.");
  nb::class_<DirectoryDisk, Disk>(m, "DirectoryDisk", "A directory of a real file system, locked for one process.")
      .def(nb::init<const std::string&>(), "path"_a);
  nb::class_<SimDisk, Disk>(m, "SimDisk",
                            "A disk in memory that may lose unsynced data; deterministic for equal seeds.")
      .def(nb::init<std::uint64_t, std::uint64_t>(), "seed"_a, "capacity"_a = std::uint64_t{1} << 60)
      .def("power_cut", &SimDisk::power_cut, "seed"_a,
           "Keeps a random part of the unsynced sectors. Close the store before.")
      .def("crash", &SimDisk::crash, "Keeps all data, as when only the process ends. Close the store before.")
      .def("lie", &SimDisk::lie, "seed"_a, "Loses or misplaces one of the next few writes that are synced.")
      .def(
          "fail",
          [](SimDisk& disk, std::uint64_t after, int fault, std::uint64_t times) {
            if (fault < 0 || fault > 2)
              throw Error(Code::invalid, "invalid fault: expected 0 (none), 1 (EIO) or 2 (ENOSPC)");
            disk.fail(after, static_cast<Fault>(fault), times);
          },
          "after"_a, "fault"_a, "times"_a = ~std::uint64_t{0},
          "Makes `times` calls fail after `after` more calls; fault 0: none, 1: EIO, 2: ENOSPC.")
      .def("calls", &SimDisk::calls)
      .def("lies_told", &SimDisk::lies_told)
      .def("used_bytes", &SimDisk::used_bytes, "prefix"_a = "", "Bytes used by the files with this prefix.");
}

}  // namespace

void bind(nb::module_ m) {
  m.doc() = "Chunk stores on real and simulated disks. Statuses and kinds are indices of statuses() and kinds().";
  m.def(
      "statuses",
      [] {
        return nb::make_tuple("ok", "stale_routing", "duplicate", "diverged", "corrupt", "no_space", "io_error",
                              "not_found", "invalid");
      },
      nb::sig("def statuses() -> tuple[str, ...]"), "The names of the statuses, by number.");
  m.def(
      "kinds", [] { return nb::make_tuple("write", "truncate", "extend", "remove", "replace"); },
      nb::sig("def kinds() -> tuple[str, ...]"), "The names of the kinds of an apply, by number.");
  m.attr("ANY_BASE") = kAnyBase;
  bind_disks(m);
  nb::class_<Store>(m, "Core", "Native store, for a replica's StoreLookup.");
  nb::class_<PyStore>(m, "Store", "The chunks of one target. native/fs3/store/store.hpp documents each call.")
      .def(nb::init<Disk&, std::uint32_t, std::uint32_t, std::uint64_t, std::uint64_t>(), "disk"_a, "target"_a = 0,
           "chain"_a = 0, "log_bytes"_a = Options{}.log_bytes, "reserve_bytes"_a = Options{}.reserve_bytes,
           nb::keep_alive<1, 2>(),
           "Opens or makes a store. Raises ValueError for another target's store, StorageError or NoSpace.")
      .def_prop_ro("core", &PyStore::get, nb::rv_policy::reference_internal, "Valid until the store is closed.")
      .def("close", &PyStore::close, "Closes the store without a write: unsynced changes are as after a crash.")
      .def("apply", &PyStore::apply, "op"_a, "inode"_a, "index"_a, "base"_a, "version"_a, "chain_version"_a, "kind"_a,
           "offset"_a = 0, "length"_a = 0, "data"_a = nb::bytes("", 0), "crcs"_a = nb::bytes("", 0),
           "committed"_a = false, "client"_a = 0, "channel"_a = 0, "seq"_a = 0,
           nb::sig("def apply(self, op: int, inode: int, index: int, base: int, version: int, chain_version: int, "
                   "kind: int, "
                   "offset: int = 0, length: int = 0, data: typing_extensions.Buffer = b'', "
                   "crcs: typing_extensions.Buffer = b'', committed: bool = False, client: int = 0, channel: int = 0, "
                   "seq: int = 0) -> int"),
           "Returns 0 if the change is queued (sync() returns its outcome), else the status of the refusal.")
      .def("sync", &PyStore::sync, nb::sig("def sync(self) -> list[tuple[int, int, int, int, int]]"),
           "Makes all applied changes durable; returns a list of (op, status, version, length, crc).")
      .def(
          "commit",
          [](PyStore& s, std::uint64_t i, std::uint32_t x, Version v) { return number(s.get().commit({i, x}, v)); },
          "inode"_a, "index"_a, "version"_a)
      .def(
          "drop",
          [](PyStore& s, std::uint64_t i, std::uint32_t x, Version v) { return number(s.get().drop({i, x}, v)); },
          "inode"_a, "index"_a, "version"_a)
      .def("read", &PyStore::read, "inode"_a, "index"_a, "version"_a = 0, "offset"_a = 0,
           "length"_a = ~std::uint32_t{0},
           nb::sig(
               "def read(self, inode: int, index: int, version: int = 0, offset: int = 0, length: int = 4294967295) -> "
               "tuple[int, int, int, int, bytes, bytes]"),
           "Reads whole blocks: (status, version, length of the chunk, offset of the bytes, bytes, CRCs).")
      .def(
          "entry", [](PyStore& s, std::uint64_t i, std::uint32_t x) { return row(s.get().entry({i, x})); }, "inode"_a,
          "index"_a,
          nb::sig("def entry(self, inode: int, index: int) -> tuple[int, int, int, int, int, int, int, int, int, int, "
                  "bool]"),
          "(inode, index, then version, chain version, length, crc of the committed version and of the pending one, "
          "and "
          "whether the pending version removes the chunk); version 0: none.")
      .def(
          "page",
          [](PyStore& s, std::optional<std::pair<std::uint64_t, std::uint32_t>> after, std::size_t limit) {
            const auto from = after ? std::optional(ChunkId{after->first, after->second}) : std::nullopt;
            nb::list list;
            for (const Entry& e : s.get().page(from, limit)) list.append(row(e));
            return list;
          },
          "after"_a.none(), "limit"_a,
          nb::sig("def page(self, after: tuple[int, int] | None, limit: int) -> "
                  "list[tuple[int, int, int, int, int, int, int, int, int, int, bool]]"),
          "Entries behind `after`, in order.")
      .def(
          "last",
          [](PyStore& s, std::uint64_t inode, std::uint32_t upto, std::uint32_t stride) -> nb::object {
            const auto found = s.get().last({inode, upto}, stride);
            if (!found) return nb::none();
            return nb::make_tuple(found->chunk.index, found->length, found->run);
          },
          "inode"_a, "upto"_a = kLastIndex, "stride"_a = 0,
          nb::sig("def last(self, inode: int, upto: int = 4294967295, stride: int = 0) -> tuple[int, int, int] | None"),
          "(index, length, run) of the committed chunk with the largest index up to `upto`. run: number of chunks, "
          "`stride` indexes apart, in the row that ends there; 1 without a stride.")
      .def("check", &PyStore::check, "inode"_a, "index"_a, "Status of the committed bytes against their CRCs.")
      .def("snapshot", &PyStore::snapshot)
      .def("snapshot_due", [](PyStore& s) { return s.get().snapshot_due(); })
      .def("floor", [](PyStore& s) { return s.get().floor(); })
      .def(
          "raise_floor", [](PyStore& s, Version v) { s.get().raise_floor(v); }, "floor"_a)
      .def(
          "tags",
          [](PyStore& s) {
            nb::list list;
            for (const Tagged& t : s.get().tags()) list.append(row(t));
            return list;
          },
          nb::sig("def tags(self) -> list[tuple[int, int, int, int, int, int, int]]"),
          "(client, channel, seq, inode, index, version, length) of the newest write of each channel.")
      .def(
          "keep_tag",
          [](PyStore& s, std::uint64_t client, std::uint32_t channel, std::uint64_t seq, std::uint64_t inode,
             std::uint32_t index, Version version,
             std::uint32_t length) { s.get().keep_tag({{client, channel, seq}, {inode, index}, version, length}); },
          "client"_a, "channel"_a, "seq"_a, "inode"_a, "index"_a, "version"_a, "length"_a)
      .def(
          "forget_client", [](PyStore& s, std::uint64_t client) { s.get().forget_client(client); }, "client"_a)
      .def(
          "state",
          [](PyStore& s) {
            const auto w = s.get().state();
            return nb::make_tuple(w[0], w[1], w[2], w[3]);
          },
          nb::sig("def state(self) -> tuple[int, int, int, int]"))
      .def(
          "keep_state",
          [](PyStore& s, std::uint64_t a, std::uint64_t b, std::uint64_t c, std::uint64_t d) {
            s.get().keep_state({a, b, c, d});
          },
          "a"_a, "b"_a, "c"_a, "d"_a)
      .def("damaged", [](PyStore& s) { return s.get().damaged(); })
      .def("clear_damage", [](PyStore& s) { s.get().clear_damage(); })
      .def("failed", [](PyStore& s) { return s.get().failed(); })
      .def(
          "synced", [](PyStore& s) { return s.get().synced(); }, "True if the last sync() made its batch durable.")
      .def(
          "statistics",
          [](PyStore& s) {
            const Statistics t = s.get().statistics();
            nb::dict d;
            d["chunks"] = t.chunks, d["bytes"] = t.bytes, d["extents"] = t.extents, d["extent_bytes"] = t.extent_bytes;
            d["index_bytes"] = t.index_bytes, d["log_bytes"] = t.log_bytes, d["held"] = t.held, d["mended"] = t.mended;
            return d;
          },
          nb::sig("def statistics(self) -> dict[str, int]"));
}

}  // namespace ff::fs3::store
