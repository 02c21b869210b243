// Python's view of the record reader: `fireflyer._native.ffrecord`. Every call that reads a file releases
// the GIL; the arrays that come back own their memory.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>

#include "ffrecord/reader.hpp"

namespace nb = nanobind;

namespace ff::ffrecord { void bind(nb::module_ m); }

namespace {

using ff::ffrecord::Batch;
using ff::ffrecord::Reader;
using ff::ffrecord::RecordFile;
using Indices = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Array = nb::ndarray<nb::numpy, T, nb::ndim<1>>;

template <typename T>
Array<T> adopt(std::unique_ptr<T[]> data, std::size_t size) {
  T* const pointer = data.get();
  nb::capsule owner(pointer, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  data.release();
  return Array<T>(pointer, {size}, owner);
}

template <typename T>
Array<T> copy(const std::vector<T>& values) {
  auto data = std::make_unique_for_overwrite<T[]>(values.size());
  std::copy(values.begin(), values.end(), data.get());
  return adopt(std::move(data), values.size());
}

const RecordFile& file_at(const Reader& reader, std::int64_t file) {
  const auto& files = reader.files();
  if (file < 0 || file >= static_cast<std::int64_t>(files.size()))
    throw std::out_of_range("file index " + std::to_string(file) + " is outside [0, " +
                            std::to_string(files.size()) + ")");
  return *files[file];
}

nb::tuple read_batch(const Reader& reader, const Indices& indices) {
  Batch batch;
  {
    const nb::gil_scoped_release release;
    batch = reader.read(indices.data(), indices.size());
  }
  const std::size_t bytes = batch.bytes();
  return nb::make_tuple(adopt(std::move(batch.arena), bytes),
                        adopt(std::move(batch.offsets), batch.count + 1));
}

std::vector<std::string> unchecked(const Reader& reader) {
  std::vector<std::string> paths;
  for (const auto& file : reader.files())
    if (!file->metadata_checked()) paths.push_back(file->path());
  return paths;
}

}  // namespace

void ff::ffrecord::bind(nb::module_ m) {
  m.doc() = "Random batch reads of FFRecord files.";
  nb::class_<Reader>(m, "Reader", "Open record files, their samples numbered as one sequence; thread-safe.")
      .def(nb::init<const std::vector<std::string>&, bool>(), nb::arg("paths"), nb::arg("check_data"),
           nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("n", &Reader::count)
      .def("read", &read_batch, nb::arg("indices"),
           nb::sig("def read(self, indices: numpy.typing.NDArray[numpy.int64]) -> "
                   "tuple[numpy.typing.NDArray[numpy.uint8], numpy.typing.NDArray[numpy.int64]]"),
           "One arena and the k + 1 offsets of the k samples in it, in the order of `indices`.")
      .def("check_all", &Reader::check_all, nb::call_guard<nb::gil_scoped_release>(),
           "Reads every file whole and compares every checksum.")
      .def("unchecked", &unchecked, "Files whose metadata carries no checksum.")
      .def("offsets", [](const Reader& r, std::int64_t file) { return copy(file_at(r, file).offsets()); },
           nb::arg("file"),
           nb::sig("def offsets(self, file: int) -> numpy.typing.NDArray[numpy.int64]"),
           "Start of each sample of one file in bytes, and the size of the file.")
      .def("checksums", [](const Reader& r, std::int64_t file) { return copy(file_at(r, file).checksums()); },
           nb::arg("file"),
           nb::sig("def checksums(self, file: int) -> numpy.typing.NDArray[numpy.uint32]"),
           "CRC32 of each sample of one file.");
}
