// The one module `fireflyer._native`: one submodule per part, and the one place where native errors become Python
// exceptions.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "base/crc/crc32.hpp"
#include "base/crc/crc32c.hpp"
#include "base/crc/crc_fold.hpp"
#include "base/error.hpp"
#include "base/isa.hpp"

namespace nb = nanobind;

// One function per part, defined in native/<part>/bind.cpp.
namespace ff::checkpoint { void bind(nb::module_ m); }
namespace ff::envpool { void bind(nb::module_ m); }
namespace ff::fabric { void bind(nb::module_ m); }
namespace ff::ffrecord { void bind(nb::module_ m); }
namespace ff::fs3 { void bind(nb::module_ m); }
namespace ff::hai { void bind(nb::module_ m); }
namespace ff::haiprof { void bind(nb::module_ m); }
namespace ff::hfreduce { void bind(nb::module_ m); }
namespace ff::kv { void bind(nb::module_ m); }
namespace ff::nn { void bind(nb::module_ m); }
namespace ff::storage { void bind(nb::module_ m); }

namespace {

const char* class_name(ff::Code code) {
  switch (code) {
    case ff::Code::corrupted: return "Corrupted";
    case ff::Code::no_space: return "NoSpace";
    case ff::Code::storage: return "StorageError";
    case ff::Code::peer_lost: return "PeerLost";
    case ff::Code::deadline_exceeded: return "DeadlineExceeded";
    case ff::Code::late:
    case ff::Code::rank_failed: return "RankFailed";
    case ff::Code::cancelled: return "Cancelled";
    default: return "CollectiveError";
  }
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const ff::Error& error) {
    if (error.code() == ff::Code::invalid) {
      PyErr_SetString(PyExc_ValueError, error.what());
      return;
    }
    const nb::object type = nb::module_::import_("fireflyer.errors").attr(class_name(error.code()));
    const nb::object value = error.code() == ff::Code::rank_failed || error.code() == ff::Code::late
                                 ? type(nb::str(error.what()), nb::arg("rank") = error.rank())
                                 : type(nb::str(error.what()));
    PyErr_SetObject(type.ptr(), value.ptr());
  }
}

// The contiguous buffer of a Python object. The destructor releases the buffer.
class Buffer {
 public:
  explicit Buffer(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_C_CONTIGUOUS) != 0) throw nb::python_error();
  }
  ~Buffer() { PyBuffer_Release(&view_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  const void* data() const { return view_.buf; }
  std::size_t size() const { return static_cast<std::size_t>(view_.len); }

 private:
  Py_buffer view_{};
};

std::uint32_t crc32(nb::handle data, std::uint32_t value) {
  const Buffer buffer(data);
  const nb::gil_scoped_release release;
  return ff::crc32(value, buffer.data(), buffer.size());
}

std::uint32_t crc32c(nb::handle data, std::uint32_t start) {
  const Buffer buffer(data);
  constexpr std::size_t kShort = 64 << 10;  // takes less time than releasing the GIL
  if (buffer.size() <= kShort) return ff::crc32c(start, buffer.data(), buffer.size());
  const nb::gil_scoped_release release;
  return ff::crc32c(start, buffer.data(), buffer.size());
}

}  // namespace

NB_MODULE(_native, m) {
  // Not a leak: torch keeps its process groups, and the objects behind them, to the end of the process.
  nb::set_leak_warnings(false);
  nb::register_exception_translator(translate);
  m.def("crc32", &crc32, nb::arg("data"), nb::arg("value") = 0,
        nb::sig("def crc32(data: typing_extensions.Buffer, value: int = 0) -> int"),
        "CRC32 of zlib's polynomial over any contiguous buffer, continuing `value`; releases the GIL.");
  m.def("crc32c", &crc32c, nb::arg("data"), nb::arg("start") = 0,
        nb::sig("def crc32c(data: typing_extensions.Buffer, start: int = 0) -> int"),
        "CRC32C (Castagnoli) over any contiguous buffer, continuing `start`; releases the GIL for long buffers.");
  m.def("crc32c_combine", &ff::crc32c_combine, nb::arg("a"), nb::arg("b"), nb::arg("bytes_b"),
        "CRC32C of A followed by B, from the CRC32C of each and B's length in bytes.");
  ff::isa();  // an invalid FIREFLYER_ISA fails the import, not some thread later
  m.def(
      "isa", [] { return ff::name(ff::isa()); },
      "Instruction set in use: 'base', 'v3' or 'v4' (the environment's FIREFLYER_ISA forces one).");
  m.def("crc_width", &ff::crc_width,
        "Bits of the carry-less products in use for CRCs: 512, 256 (v3, with VPCLMULQDQ) or 128.");
  ff::checkpoint::bind(m.def_submodule("checkpoint"));
  ff::envpool::bind(m.def_submodule("envpool"));
  ff::fabric::bind(m.def_submodule("fabric"));
  ff::ffrecord::bind(m.def_submodule("ffrecord"));
  ff::fs3::bind(m.def_submodule("fs3"));
  ff::hai::bind(m.def_submodule("hai"));
  ff::haiprof::bind(m.def_submodule("haiprof"));
  ff::hfreduce::bind(m.def_submodule("hfreduce"));
  ff::kv::bind(m.def_submodule("kv"));
  ff::nn::bind(m.def_submodule("nn"));
  ff::storage::bind(m.def_submodule("storage"));
}
