// Python binding of file access: `fireflyer._native.storage`. Every call that reads or writes releases the GIL.
#include <sys/mman.h>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <deque>
#include <memory>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "storage/appender.hpp"
#include "storage/checked_read.hpp"
#include "storage/summed_read.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ff::storage {

void bind(nb::module_ m);

namespace {

using Rows = nb::ndarray<const std::int64_t, nb::shape<-1, 4>, nb::c_contig, nb::device::cpu>;
using Crcs = nb::ndarray<const std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

[[noreturn]] void raise_os_error(const std::system_error& error) {
  errno = error.code().value();
  PyErr_SetFromErrno(PyExc_OSError);
  throw nb::python_error();
}

// An Appender that keeps the Python objects alive whose memory it writes. The GIL guards only `kept_`, so only one thread
// at a time may call the methods.
class Writer {
 public:
  Writer(int fd, std::uint64_t size) {
    guarded([&] { appender_ = std::make_unique<Appender>(fd, size); });
  }
  ~Writer() { close(); }
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  void append(nb::handle data) {
    Appender& appender = open();
    Py_buffer view;
    if (PyObject_GetBuffer(data.ptr(), &view, PyBUF_C_CONTIGUOUS) != 0) throw nb::python_error();
    end_ += static_cast<std::uint64_t>(view.len);
    kept_.push_back({view, end_});
    guarded([&] { appender.append(static_cast<const char*>(view.buf), static_cast<std::size_t>(view.len)); });
    release(appender.settled());
  }
  void finish() {
    Appender& appender = open();
    guarded([&] { appender.finish(); });
    release(end_);
  }
  void close() {
    if (appender_) guarded([this] { appender_.reset(); });
    release(end_);
  }

 private:
  struct Kept {
    Py_buffer view;
    std::uint64_t end;  // offset in the file after the last byte of `view`
  };

  Appender& open() const {
    if (!appender_) throw Error(Code::invalid, "the writer is closed");
    return *appender_;
  }
  template <class Work>
  static void guarded(const Work& work) {
    try {
      const nb::gil_scoped_release released;
      work();
    } catch (const std::system_error& error) {
      raise_os_error(error);
    }
  }
  void release(std::uint64_t settled) {
    for (; !kept_.empty() && kept_.front().end <= settled; kept_.pop_front()) PyBuffer_Release(&kept_.front().view);
  }

  std::unique_ptr<Appender> appender_;
  std::deque<Kept> kept_;
  std::uint64_t end_ = 0;
};

void read(const std::vector<std::string>& paths, const Rows& rows, const Crcs& crcs, unsigned threads, bool in_place) {
  if (crcs.shape(0) != rows.shape(0))
    throw Error(Code::invalid,
                std::to_string(rows.shape(0)) + " segments and " + std::to_string(crcs.shape(0)) + " CRCs");
  std::vector<Segment> segments;
  segments.reserve(rows.shape(0));
  for (std::size_t i = 0; i < rows.shape(0); ++i) {
    const std::int64_t* const row = rows.data() + 4 * i;
    segments.push_back(
        {static_cast<std::size_t>(row[0]), row[1], row[2], reinterpret_cast<char*>(row[3]), crcs.data()[i]});
  }
  try {
    const nb::gil_scoped_release release;
    read_checked(paths, segments, {.threads = threads, .in_place = in_place});
  } catch (const SegmentError& error) {
    const char* const name = error.code() == Code::corrupted  ? "Corrupted"
                             : error.code() == Code::no_space ? "NoSpace"
                                                              : "StorageError";
    const nb::object type = nb::module_::import_("fireflyer.errors").attr(name);
    const nb::object value = type(nb::str(error.what()));
    value.attr("segment") = error.segment();
    PyErr_SetObject(type.ptr(), value.ptr());
    throw nb::python_error();
  }
}

}  // namespace

void bind(nb::module_ m) {
  m.doc() = "Files at the speed of the disk: appending with O_DIRECT, reading with checksums.";
  nb::class_<Writer>(m, "Writer",
                     "Writes one new file sequentially, with O_DIRECT where possible. Several requests are in flight, "
                     "also between the calls. Errors are OSError; after one, only close() may be called.")
      .def(nb::init<int, std::uint64_t>(), "fd"_a, "size"_a = 0,
           "`fd`: an empty file that the caller owns and keeps open until close(). `size`: number of bytes that will "
           "be appended, if known; a full disk is then detected here.")
      .def("append", &Writer::append, "data"_a, nb::sig("def append(self, data: typing_extensions.Buffer) -> None"),
           "Adds contiguous bytes, which must not change until finish(). They are written without a copy if their "
           "memory begins at a page and the number of bytes before them is a multiple of 4096.")
      .def("finish", &Writer::finish, "Waits for all requests and cuts the file to its length. Does not fsync.")
      .def("close", &Writer::close, "Waits for requests in flight and releases the buffers.");
  m.def(
      "advise_huge",
      [](std::uintptr_t address, std::size_t bytes) {
        constexpr std::uintptr_t kPage = 4096;
        const std::uintptr_t first = (address + kPage - 1) / kPage * kPage, end = (address + bytes) / kPage * kPage;
        if (end > first) static_cast<void>(::madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE));
      },
      "address"_a, "bytes"_a,
      "Asks for huge pages in fresh memory, so that filling it takes fewer page faults. Never fails.");
  m.def(
      "read_summed",
      [](const std::vector<std::string>& paths, const Rows& rows, const std::vector<std::uint32_t>& starts) {
        if (starts.size() != rows.shape(0))
          throw Error(Code::invalid,
                      std::to_string(rows.shape(0)) + " ranges and " + std::to_string(starts.size()) + " starts");
        std::vector<SummedRange> ranges;
        ranges.reserve(rows.shape(0));
        for (std::size_t i = 0; i < rows.shape(0); ++i) {
          const std::int64_t* const row = rows.data() + 4 * i;
          ranges.push_back(
              {static_cast<std::size_t>(row[0]), row[1], row[2], reinterpret_cast<char*>(row[3]), starts[i]});
        }
        const nb::gil_scoped_release release;
        return read_summed(paths, ranges);
      },
      "paths"_a, "rows"_a, "starts"_a,
      "Reads ranges, int64[n, 4] of (index of the path, offset, bytes, address), on several threads. Returns the "
      "CRC32C of each range, continued from its value in `starts`. The memory must stay alive. Raises Corrupted if a "
      "file ends inside a range, StorageError if a file cannot be read.");
  m.def("read_checked", &read, "paths"_a, "segments"_a, "crcs"_a, "threads"_a = 0, "in_place"_a = false,
        "Reads segments, int64[n, 4] of (index of the path, offset, bytes <= 4 MiB, address), and compares their CRC32 "
        "with crcs, uint32[n]. The memory must stay alive. Raises Corrupted for a mismatch or a file that ends inside "
        "a segment, StorageError if a file cannot be read; the error's `segment` is the segment's index. in_place: the "
        "disk may write directly to the memory, which must be shared unless the process does not fork meanwhile.");
}

}  // namespace ff::storage
