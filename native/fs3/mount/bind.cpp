// Python binding of mounts: `fireflyer._native.fs3.mount`. Calls that wait for requests or move bytes release the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "base/error.hpp"
#include "fs3/mount/core.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ff::fs3::mount {

void bind(nb::module_ m);

namespace {

using Free = nb::call_guard<nb::gil_scoped_release>;

Attributes attributes_of(const nb::tuple& from) {
  Attributes to;
  to.inode = nb::cast<std::uint64_t>(from[0]);
  to.mode = nb::cast<std::uint32_t>(from[1]);
  to.nlink = nb::cast<std::uint32_t>(from[2]);
  to.uid = nb::cast<std::uint32_t>(from[3]);
  to.gid = nb::cast<std::uint32_t>(from[4]);
  to.size = nb::cast<std::int64_t>(from[5]);
  to.atime = nb::cast<std::int64_t>(from[6]);
  to.mtime = nb::cast<std::int64_t>(from[7]);
  to.ctime = nb::cast<std::int64_t>(from[8]);
  to.block = nb::cast<std::uint32_t>(from[9]);
  to.device = nb::cast<std::uint32_t>(from[10]);
  to.age_s = nb::cast<double>(from[11]);
  return to;
}

std::string string_of(nb::handle from) {
  const auto bytes = nb::cast<nb::bytes>(from);
  return {bytes.c_str(), bytes.size()};
}

// Converts an answer of Python, which has one of these forms: error number | bytes | [(name, attributes), ...] |
// attributes | (FileState, keep) | (FileState, attributes) | (block, blocks, free, files).
Answer answer_of(const nb::object& from) {
  constexpr std::size_t kStatfs = 4;
  Answer answer;
  if (nb::isinstance<nb::int_>(from)) {
    answer.error = nb::cast<int>(from);
  } else if (nb::isinstance<nb::bytes>(from)) {
    answer.bytes = string_of(from);
  } else if (nb::isinstance<nb::list>(from)) {
    for (const nb::handle row : nb::cast<nb::list>(from)) {
      const auto entry = nb::cast<nb::tuple>(row);
      answer.entries.push_back({string_of(entry[0]), attributes_of(nb::cast<nb::tuple>(entry[1]))});
    }
  } else {
    const auto row = nb::cast<nb::tuple>(from);
    if (nb::isinstance<FileState>(row[0])) {
      answer.file = nb::cast<std::shared_ptr<FileState>>(row[0]);
      if (nb::isinstance<nb::tuple>(row[1])) {
        answer.attributes = attributes_of(nb::cast<nb::tuple>(row[1]));
      } else {
        answer.keep = nb::cast<bool>(row[1]);
      }
    } else if (row.size() == kStatfs) {
      answer.attributes.block = nb::cast<std::uint32_t>(row[0]);
      answer.blocks = nb::cast<std::uint64_t>(row[1]);
      answer.free = nb::cast<std::uint64_t>(row[2]);
      answer.files = nb::cast<std::uint64_t>(row[3]);
    } else {
      answer.attributes = attributes_of(row);
    }
  }
  return answer;
}

// A mount, and its connection to the file system's Python code.
class Mount {
 public:
  Mount(io::Engine& engine, nb::callable call, nb::callable finish, double attempt_s, double slowest)
      : core_(engine, calling(std::move(call)), finishing(std::move(finish)), {attempt_s, slowest}) {}

  void mount(const std::string& library, const std::string& directory, const std::string& source, double attributes_s,
             bool others) {
    session_ = open_session(library, directory, core_, {attributes_s, others, source});
  }
  void work() {
    if (session_ == nullptr) throw Error(Code::invalid, "nothing is mounted: call mount() first");
    session_->work();
  }
  void stop() {
    if (session_ != nullptr) session_->stop();
  }
  void close() { session_.reset(); }
  Core& core() { return core_; }

 private:
  static Core::Call calling(nb::callable call) {
    return [call = std::move(call)](const Request& request) {
      const nb::gil_scoped_acquire held;
      try {
        return answer_of(call(nb::cast(request, nb::rv_policy::copy)));
      } catch (nb::python_error& error) {
        error.discard_as_unraisable("a request to the mount");
        return Answer{.error = EIO};
      }
    };
  }
  static Core::Finish finishing(nb::callable finish) {
    return [finish = std::move(finish)](FileState& file, client::Pieces& pieces, bool write, std::int32_t caller_pid) {
      const nb::gil_scoped_acquire held;
      try {
        const nb::object batch = nb::cast(&pieces, nb::rv_policy::reference);
        return nb::cast<int>(finish(file.inode, batch, write, caller_pid));
      } catch (nb::python_error& error) {
        error.discard_as_unraisable("bytes of the mount");
        return EIO;
      }
    };
  }

  Core core_;
  std::unique_ptr<Session> session_;
};

std::int64_t move(Mount& mount, FileState& file, std::int64_t offset, nb::handle memory, bool write) {
  Py_buffer view;
  if (PyObject_GetBuffer(memory.ptr(), &view, PyBUF_C_CONTIGUOUS | (write ? 0 : PyBUF_WRITABLE)) != 0)
    throw nb::python_error();
  std::int64_t count = 0;
  {
    const nb::gil_scoped_release released;
    const std::span<std::byte> bytes(static_cast<std::byte*>(view.buf), static_cast<std::size_t>(view.len));
    count = write ? mount.core().write(file, offset, bytes, 0) : mount.core().read(file, offset, bytes, 0);
  }
  PyBuffer_Release(&view);
  return count;
}

// Returns the method that reads or writes.
auto mover(bool write) {
  return [write](Mount& mount, FileState& file, std::int64_t offset, nb::handle memory) {
    return move(mount, file, offset, memory, write);
  };
}

void bind_request(nb::module_ m) {
  nb::class_<Request>(m, "Request", "Call of the kernel for names, attributes or open files.")
      .def_prop_ro("op", [](const Request& r) { return std::string(r.op); })
      .def_ro("inode", &Request::inode)
      .def_ro("other", &Request::other)
      .def_prop_ro("name", [](const Request& r) { return nb::bytes(r.name.data(), r.name.size()); })
      .def_prop_ro("data", [](const Request& r) { return nb::bytes(r.data.data(), r.data.size()); })
      .def_ro("flags", &Request::flags)
      .def_ro("mode", &Request::mode)
      .def_ro("offset", &Request::offset)
      .def_ro("size", &Request::size)
      .def_ro("uid", &Request::uid)
      .def_ro("gid", &Request::gid)
      .def_ro("atime", &Request::atime)
      .def_ro("mtime", &Request::mtime)
      .def_ro("caller_uid", &Request::caller_uid)
      .def_ro("caller_gid", &Request::caller_gid)
      .def_ro("caller_pid", &Request::caller_pid);
}

}  // namespace

void bind(nb::module_ m) {
  bind_request(m);
  m.attr("PAGE") = Handler::kPage;
  nb::class_<FileState>(m, "FileState", "State of an inode, shared by all open files of it. Any thread.")
      .def(nb::new_([](std::uint64_t inode, const client::FileMap& map, std::int64_t end) {
             return std::make_shared<FileState>(inode, map, end);
           }),
           "inode"_a, "map"_a, "end"_a)
      .def_ro("inode", &FileState::inode)
      .def_prop_rw(
          "end", [](const FileState& f) { return f.end.load(); }, [](FileState& f, std::int64_t to) { f.end = to; },
          "Length in bytes that this mount knows.")
      .def_prop_rw(
          "widened", [](const FileState& f) { return f.widened.load(); },
          [](FileState& f, std::int64_t to) { f.widened = to; }, "Limit of writes: no byte at or beyond it is written.")
      .def_prop_ro(
          "writers", [](const FileState& f) { return f.writers.load(); }, "Writes in flight.")
      .def_prop_ro(
          "dirty", [](const FileState& f) { return f.written != kClean; }, "True if bytes were written since `take`.")
      .def_prop_ro(
          "written_ns", [](const FileState& f) { return f.written_ns.load(); },
          "Time of the last write, in ns since the epoch.")
      .def(
          "take", [](FileState& f) { return f.written.exchange(kClean); },
          "Returns the largest end written since the last call, or -1.")
      .def("reach", &FileState::reach, "end"_a, "Raises the file's `end` to at least this value.")
      .def("wrote", &FileState::wrote, "end"_a, "Records a write up to `end`.");
  nb::class_<Mount>(m, "Mount", "Answers the kernel's requests for a directory. Any thread.")
      .def(nb::init<io::Engine&, nb::callable, nb::callable, double, double>(), "engine"_a, "call"_a, "finish"_a,
           "attempt_s"_a, "slowest"_a, nb::keep_alive<1, 2>(),
           nb::sig("def __init__(self, engine: fireflyer._native.fs3.client.Engine, "
                   "call: collections.abc.Callable[[Request], object], "
                   "finish: collections.abc.Callable[[int, fireflyer._native.fs3.client.Pieces, bool, int], int], "
                   "attempt_s: float, slowest: float) -> None"),
           "call(request) returns an error number or the answer. finish(inode, pieces, write, caller_pid) finishes "
           "pieces that failed or touched a hole, and returns an error number. attempt_s: timeout of an attempt in "
           "seconds, to which the bytes at the rate `slowest` (bytes/s) are added.")
      .def("mount", &Mount::mount, "library"_a, "directory"_a, "source"_a, "attributes_s"_a, "others"_a, Free(),
           "library: path of libff_fuse.so. source: name in /proc/mounts. others: allow other users. Raises "
           "StorageError.")
      .def("work", &Mount::work, Free(), "Answers requests until the directory is unmounted or `stop` is called.")
      .def("stop", &Mount::stop, Free())
      .def("close", &Mount::close, Free(), "Unmounts the directory. No thread may be in `work`.")
      .def("read", mover(false), "file"_a, "offset"_a, "memory"_a,
           nb::sig("def read(self, file: FileState, offset: int, memory: typing_extensions.Buffer) -> int"),
           "Reads into memory, as the kernel's READ does; returns the bytes read or a negative error number.")
      .def("write", mover(true), "file"_a, "offset"_a, "memory"_a,
           nb::sig("def write(self, file: FileState, offset: int, memory: typing_extensions.Buffer) -> int"),
           "Writes memory, as the kernel's WRITE does; returns the bytes written or a negative error number.");
}

}  // namespace ff::fs3::mount
