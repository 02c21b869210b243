// Python binding of the client's engine: `fireflyer._native.fs3.client`. Calls that move bytes release the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "fs3/client/batch.hpp"
#include "fs3/io/client/engine.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ff::fs3::client {

void bind(nb::module_ m);

namespace {

using Free = nb::call_guard<nb::gil_scoped_release>;
using Rows = nb::ndarray<const std::int64_t, nb::shape<-1, 4>, nb::c_contig, nb::device::cpu>;
using io::Engine;
using io::Outcome;
using io::Piece;

// Views of Python's memory, released on destruction.
class Views {
 public:
  Views() = default;
  Views(Views&&) = default;
  Views& operator=(Views&&) = delete;
  ~Views() {
    for (Py_buffer& view : views_) PyBuffer_Release(&view);
  }
  Py_buffer& add(nb::handle object, bool writable) {
    Py_buffer view;
    const int flags = PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object.ptr(), &view, flags) != 0) throw nb::python_error();
    return views_.emplace_back(view);
  }

 private:
  std::vector<Py_buffer> views_;
};

struct Batch : Pieces {
  Views views = {};
  std::vector<std::int64_t> counts = {};  // bytes of each request
};

Batch of_ranges(const std::vector<const FileMap*>& files, const Rows& rows) {
  std::vector<Range> ranges;
  ranges.reserve(rows.shape(0));
  for (std::size_t n = 0; n < rows.shape(0); ++n) {
    const std::int64_t* const row = rows.data() + 4 * n;
    ranges.push_back({static_cast<std::size_t>(row[0]), row[1], row[2], reinterpret_cast<std::byte*>(row[3])});
  }
  Batch batch{{split(files, ranges)}};
  for (const Range& range : ranges) batch.counts.push_back(range.bytes);
  return batch;
}

// Makes a batch from buffers. `ends`: ends of the files, beyond which no byte is read; empty for writes.
Batch of_buffers(const std::vector<const FileMap*>& files, const std::vector<std::int64_t>& ends,
                 const std::vector<std::tuple<std::size_t, std::int64_t, nb::object>>& requests) {
  Batch batch;
  std::vector<Range> ranges;
  ranges.reserve(requests.size());
  for (const auto& [file, offset, object] : requests) {
    const Py_buffer& view = batch.views.add(object, !ends.empty());
    std::int64_t bytes = view.len;
    if (!ends.empty()) bytes = std::min(bytes, std::max<std::int64_t>(ends.at(file) - offset, 0));
    batch.counts.push_back(bytes);
    ranges.push_back({file, offset, bytes, static_cast<std::byte*>(view.buf)});
  }
  batch.pieces = split(files, ranges);
  return batch;
}

Batch of_chunks(const FileMap& file, Kind kind, const std::vector<std::uint32_t>& indexes, std::uint32_t length) {
  Batch batch;
  batch.pieces.reserve(indexes.size());
  for (const std::uint32_t index : indexes) {
    Piece& piece = batch.pieces.emplace_back();
    piece.chunk = {file.inode, index};
    piece.chain = file.chain(index);
    piece.kind = kind;
    piece.length = length;
  }
  return batch;
}

Batch of_chains(const FileMap& file, const std::vector<std::tuple<std::size_t, std::uint32_t>>& asks) {
  Batch batch;
  batch.pieces.reserve(asks.size());
  for (const auto& [chain, upto] : asks) {
    Piece& piece = batch.pieces.emplace_back();
    piece.chunk = {file.inode, upto};
    piece.chain = file.chain(chain);
    piece.stride = static_cast<std::uint32_t>(file.chains.size());
  }
  return batch;
}

Batch joined(const std::vector<const Batch*>& batches) {
  Batch all;
  for (const Batch* const one : batches) {
    if (!one->counts.empty()) throw Error(Code::invalid, "cannot join batches with memory");
    all.pieces.insert(all.pieces.end(), one->pieces.begin(), one->pieces.end());
  }
  return all;
}

Engine::Clock::time_point after(double seconds) {
  constexpr double kLongest = 1e6;
  return Engine::Clock::now() + std::chrono::duration_cast<Engine::Clock::duration>(
                                    std::chrono::duration<double>(std::clamp(seconds, 0.0, kLongest)));
}

void look_at_signals() {
  const nb::gil_scoped_acquire held;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

// Wraps Python's callable for the engine. An exception that means an unreachable node becomes a native error; all other
// exceptions propagate. The conversion runs no Python code, not even to format a message. During such code a signal
// handler could raise an exception, which would be lost.
Engine::Connect connecting(nb::callable connect) {
  const nb::module_ errors = nb::module_::import_("fireflyer.errors");
  return [connect = std::move(connect), lost = nb::object(errors.attr("PeerLost")),
          late = nb::object(errors.attr("DeadlineExceeded"))](std::uint32_t node, std::chrono::milliseconds limit) {
    const nb::gil_scoped_acquire held;
    try {
      return nb::cast<int>(connect(node, std::chrono::duration<double>(limit).count()));
    } catch (const nb::python_error& error) {
      if (error.matches(lost)) throw Error(Code::peer_lost, "cannot connect to a node");
      if (error.matches(late)) throw Error(Code::deadline_exceeded, "timed out while connecting to a node");
      throw;
    }
  };
}

void set_routing(Engine& engine,
                 const std::vector<std::tuple<std::uint32_t, ChainVersion, std::vector<std::uint32_t>>>& chains,
                 std::uint32_t local) {
  std::vector<io::Route> routes;
  routes.reserve(chains.size());
  for (const auto& [chain, version, nodes] : chains) routes.push_back({chain, version, nodes});
  engine.routing(routes, local);
}

nb::dict statistics(const Engine& engine) {
  const auto now = engine.statistics();
  nb::dict found;
  found["read_bytes"] = now.read_bytes;
  found["local_bytes"] = now.local_bytes;
  found["written_bytes"] = now.written_bytes;
  found["frames"] = now.frames;
  found["mismatches"] = now.mismatches;
  found["connections"] = now.connections;
  found["held"] = now.held;
  found["senders"] = now.senders;
  found["most_senders"] = now.most_senders;
  return found;
}

}  // namespace

void bind(nb::module_ m) {
  m.attr("ANY_NODE") = io::kAnyNode;
  nb::enum_<Outcome>(m, "Outcome", nb::is_arithmetic(), "Outcome of a piece; numbers below 16 are those of Status.")
      .value("OK", Outcome::ok)
      .value("STALE_ROUTING", Outcome::stale_routing)
      .value("CORRUPT", Outcome::corrupt)
      .value("INVALID", Outcome::invalid)
      .value("MISMATCH", Outcome::mismatch, "The received bytes do not match their CRCs.")
      .value("LOST", Outcome::lost, "The connection broke; a write may have been done.")
      .value("LATE", Outcome::late, "No answer before the deadline; a write may have been done.")
      .value("UNREACHABLE", Outcome::unreachable, "No connection; not done.")
      .value("NO_ROUTE", Outcome::no_route, "No target serves that chain; not done.")
      .value("NO_SPACE", static_cast<Outcome>(Status::no_space))
      .value("IO_ERROR", static_cast<Outcome>(Status::io_error))
      .value("DUPLICATE", static_cast<Outcome>(Status::duplicate))
      .value("DIVERGED", static_cast<Outcome>(Status::diverged))
      .value("OPEN", Outcome::open);
  nb::class_<FileMap>(m, "FileMap", "Chains of a file's chunks: chunk i is on chains[i % len(chains)]. Immutable.")
      .def(nb::init<std::uint64_t, std::uint64_t, std::vector<std::uint32_t>>(), "inode"_a, "chunk_size"_a, "chains"_a)
      .def_prop_ro("chains", [](const FileMap& file) { return file.chains; });
  nb::class_<Pieces>(m, "Pieces", "Pieces of chunks, and the outcome of each. Only one thread at a time may use them.")
      .def("__len__", [](const Pieces& batch) { return batch.pieces.size(); })
      .def_prop_ro("bytes", &Pieces::bytes, "Bytes of all pieces together.")
      .def("failures", &Pieces::failures, "(piece, outcome, chain, node asked) of each piece that is not OK.")
      .def("again", &Pieces::again, "piece"_a, "node"_a = io::kAnyNode,
           "Makes the next call retry this piece. A read is retried at this node, if it serves the chain.")
      .def("chunk", &Pieces::chunk, "piece"_a, "(inode, index) of a piece.")
      .def_prop_ro("holes", &Pieces::holes,
                   "Inodes of files in which a requested byte belongs to no chunk (zeros in memory). Valid once all is "
                   "read.")
      .def("found", &Pieces::found,
           "Answers to the queries of a batch made by of_chains: (index of the last chunk, number of chunks in the row "
           "that ends there, bytes of the last chunk). The indexes in a row are len(chains) apart. 0 chunks in the "
           "row: there is no chunk.");
  nb::class_<Batch, Pieces>(m, "Batch", "Pieces with the memory that they fill or write.")
      .def(nb::new_(&of_ranges), "files"_a, "rows"_a,
           "rows: int64[n, 4] of (index of the file, offset, bytes, address). The memory must stay alive; ranges that "
           "are "
           "written must not overlap.")
      .def_static(
          "of_buffers", &of_buffers, "files"_a, "ends"_a, "requests"_a,
          nb::sig("def of_buffers(files: collections.abc.Sequence[FileMap], ends: collections.abc.Sequence[int], "
                  "requests: collections.abc.Sequence[tuple[int, int, typing_extensions.Buffer]]) -> Batch"),
          "requests: (index of the file, offset, contiguous memory), kept by the batch. ends: length of each file, "
          "beyond which nothing is read; empty for writes.")
      .def_prop_ro(
          "counts", [](const Batch& batch) { return batch.counts; }, "Bytes of each request or row.")
      .def(
          "sums",
          [](const Batch& batch, const std::vector<std::uint32_t>& starts) { return batch.sums(batch.counts, starts); },
          "starts"_a,
          "CRC32C of each request or row, which continues its value in `starts`. Combines the CRCs with which the "
          "bytes were checked. Valid once all is read.")
      .def_static("of_chunks", &of_chunks, "file"_a, "kind"_a, "indexes"_a, "length"_a = 0,
                  "Makes a batch with the same change of each chunk; `length`: the chunk's new length.")
      .def_static("of_chains", &of_chains, "file"_a, "asks"_a,
                  "Makes a query for each (position of a chain in the file's order, index): for the last chunk up to "
                  "the index on that chain, and the number of chunks in the row that ends there.")
      .def_static("joined", &joined, "batches"_a, "Joins the pieces of batches that move no bytes, in order.");
  nb::class_<Engine>(m, "Engine", "The client's data path; docs/internals/fs3-service.md. Any thread.")
      .def(
          "__init__",
          [](Engine* self, std::uint64_t client, nb::callable connect, unsigned lanes, unsigned senders,
             double connect_s, bool local) {
            const auto limit = std::chrono::milliseconds(std::lround(1000 * connect_s));
            new (self) Engine(client, {lanes, senders, limit, local}, connecting(std::move(connect)), look_at_signals);
          },
          "client"_a, "connect"_a, "lanes"_a = 8, "senders"_a = 2, "connect_s"_a = 1.0, "local"_a = true,
          nb::sig("def __init__(self, client: int, connect: collections.abc.Callable[[int, float], int], "
                  "lanes: int = 8, senders: int = 2, connect_s: float = 1.0, local: bool = True) -> None"),
          "connect(node, seconds) returns the descriptor of a connected and authenticated socket, which the engine "
          "then owns, or raises PeerLost or DeadlineExceeded. local: over a Unix socket, read chunks from the node's "
          "files.")
      .def("routing", &set_routing, "chains"_a, "local"_a = io::kAnyNode,
           "chains: (chain, version, nodes of the serving targets, head first). local: the node on this machine.")
      .def(
          "read", [](Engine& e, Pieces& b, double seconds) { return e.read(b.pieces, after(seconds)); }, "batch"_a,
          "seconds"_a, Free(), "Reads the open pieces; returns how many pieces are not OK.")
      .def(
          "write", [](Engine& e, Pieces& b, double seconds) { return e.write(b.pieces, after(seconds)); }, "batch"_a,
          "seconds"_a, Free(),
          "Writes the open pieces; returns how many are not OK. A piece that was tried keeps its tag, so that the "
          "write is done once.")
      .def(
          "query_last", [](Engine& e, Pieces& b, double seconds) { return e.query_last(b.pieces, after(seconds)); },
          "batch"_a, "seconds"_a, Free(), "Sends the open queries; returns how many pieces are not OK.")
      .def("statistics", &statistics, nb::sig("def statistics(self) -> dict[str, int]"),
           "Counters: read_bytes, local_bytes (part of read_bytes: from files of this machine), written_bytes, frames, "
           "mismatches, connections, held (large reads whose answers waited for a permit), senders and most_senders "
           "(permits in use: now, and most at a time).");
}

}  // namespace ff::fs3::client
