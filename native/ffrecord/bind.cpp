// Python binding of the record reader: `fireflyer._native.ffrecord`. Every call that reads a file releases the GIL;
// returned arrays own their memory.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>

#include "base/error.hpp"
#include "ffrecord/format/v2_file.hpp"
#include "ffrecord/read/pieces.hpp"
#include "ffrecord/read/reader.hpp"

namespace nb = nanobind;

namespace ff::ffrecord { void bind(nb::module_ m); }

namespace {

using ff::ffrecord::Arena;
using ff::ffrecord::Batch;
using ff::ffrecord::Extent;
using ff::ffrecord::MappedFile;
using ff::ffrecord::Reader;
using ff::ffrecord::RecordFile;
using ff::ffrecord::Run;
using ff::ffrecord::Strategy;
using ff::ffrecord::V2File;
using ff::ffrecord::V2Index;
using ff::ffrecord::V2Page;
using ff::ffrecord::V2Slot;
using ff::ffrecord::View;
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

// Returns one number per sample of a file, and then `last` if given.
template <typename T, typename Pick>
Array<T> column(const RecordFile& file, Pick pick, const T* last = nullptr) {
  const auto count = static_cast<std::size_t>(file.count());
  auto data = std::make_unique_for_overwrite<T[]>(count + 1);
  {
    const nb::gil_scoped_release release;
    file.check_mapped();
    for (std::size_t i = 0; i < count; ++i) data[i] = pick(file.at(static_cast<std::int64_t>(i)));
  }
  if (last != nullptr) data[count] = *last;
  return adopt(std::move(data), count + (last != nullptr));
}

const RecordFile& file_at(const Reader& reader, std::int64_t file) {
  const auto& files = reader.files();
  if (file < 0 || file >= static_cast<std::int64_t>(files.size()))
    throw std::out_of_range("file index " + std::to_string(file) + " is outside [0, " + std::to_string(files.size()) +
                            ")");
  return *files[file];
}

Batch fetch(const Reader& reader, const Indices& indices) {
  const nb::gil_scoped_release release;
  return reader.read(indices.data(), indices.size());
}

// Returns an array on an arena's memory. The arena returns to its pool when the array is destroyed.
nb::object adopt(Arena arena, std::size_t bytes) {
  auto kept = std::make_unique<Arena>(std::move(arena));
  std::uint8_t* const data = kept->data();
  nb::capsule owner(kept.get(), [](void* p) noexcept { delete static_cast<Arena*>(p); });
  static_cast<void>(kept.release());
  return nb::cast(Array<std::uint8_t>(data, {bytes}, owner));
}

nb::tuple read_batch(const Reader& reader, const Indices& indices) {
  Batch batch = fetch(reader, indices);
  const std::size_t bytes = batch.bytes();
  return nb::make_tuple(adopt(std::move(batch.arena), bytes), adopt(std::move(batch.offsets), batch.count + 1));
}

// Returns array[start:end], without the interpreter.
nb::object slice(const nb::object& array, std::int64_t start, std::int64_t end) {
  const nb::object first = nb::steal(PyLong_FromLongLong(start));
  const nb::object last = nb::steal(PyLong_FromLongLong(end));
  const nb::object range = nb::steal(PySlice_New(first.ptr(), last.ptr(), nullptr));
  PyObject* const view = range.is_valid() ? PyObject_GetItem(array.ptr(), range.ptr()) : nullptr;
  if (view == nullptr) throw nb::python_error();
  return nb::steal(view);
}

nb::list read_list(const Reader& reader, const Indices& indices) {
  Batch batch = fetch(reader, indices);
  const nb::object arena = adopt(std::move(batch.arena), batch.bytes());
  nb::list views = nb::steal<nb::list>(PyList_New(static_cast<Py_ssize_t>(batch.count)));
  for (std::size_t i = 0; i < batch.count; ++i) {
    PyList_SET_ITEM(views.ptr(), static_cast<Py_ssize_t>(i),
                    slice(arena, batch.offsets[i], batch.offsets[i + 1]).release().ptr());
  }
  return views;
}

nb::object mapped(const Reader& reader, std::size_t file) {
  using Shared = std::shared_ptr<const MappedFile>;
  auto kept = std::make_unique<Shared>(reader.mapping(file));
  const MappedFile& mapping = **kept;
  nb::capsule owner(kept.get(), [](void* p) noexcept { delete static_cast<Shared*>(p); });
  static_cast<void>(kept.release());
  return nb::cast(nb::ndarray<nb::numpy, const std::uint8_t, nb::ndim<1>>(mapping.data(), {mapping.size()}, owner));
}

nb::list read_views(const Reader& reader, const Indices& indices) {
  std::vector<View> found;
  {
    const nb::gil_scoped_release release;
    found = reader.views(indices.data(), indices.size());
  }
  std::vector<nb::object> files(reader.files().size());
  nb::list views = nb::steal<nb::list>(PyList_New(static_cast<Py_ssize_t>(found.size())));
  for (std::size_t i = 0; i < found.size(); ++i) {
    nb::object& file = files[found[i].file];
    if (!file.is_valid()) file = mapped(reader, found[i].file);
    PyList_SET_ITEM(views.ptr(), static_cast<Py_ssize_t>(i),
                    slice(file, found[i].at.offset, found[i].at.offset + found[i].at.bytes).release().ptr());
  }
  return views;
}

Strategy strategy_of(const std::string& name) {
  if (name == "auto") return Strategy::automatic;
  if (name == "cached") return Strategy::cached;
  if (name == "direct") return Strategy::direct;
  if (name == "threads") return Strategy::threads;
  if (name == "mmap") return Strategy::mmap;
  throw ff::Error(ff::Code::invalid, "invalid strategy '" + name + "': expected auto, cached, direct, threads or mmap");
}

void make_reader(Reader* self, const std::vector<std::string>& paths, bool check_data, const std::string& strategy,
                 unsigned threads) {
  const ff::ffrecord::Options options{check_data, strategy_of(strategy), threads};
  const nb::gil_scoped_release release;
  new (self) Reader(paths, options);
}

Array<std::int64_t> offsets(const Reader& reader, std::int64_t number) {
  const RecordFile& file = file_at(reader, number);
  const std::int64_t size = file.size();
  return column<std::int64_t>(file, [](const Extent& extent) { return extent.offset; }, &size);
}

Array<std::uint32_t> checksums(const Reader& reader, std::int64_t file) {
  return column<std::uint32_t>(file_at(reader, file), [](const Extent& extent) { return extent.crc; });
}

Array<std::uint8_t> extents(const Reader& reader, const Indices& indices) {
  const std::size_t bytes = indices.size() * sizeof(Extent);
  auto data = std::make_unique_for_overwrite<std::uint8_t[]>(bytes);
  {
    const nb::gil_scoped_release release;
    const std::vector<Extent> found = reader.extents(indices.data(), indices.size());
    if (bytes > 0) std::memcpy(data.get(), found.data(), bytes);
  }
  return adopt(std::move(data), bytes);
}

nb::tuple locate(const Reader& reader, std::int64_t index) {
  if (index < 0 || index >= reader.count()) throw std::out_of_range("a sample index is out of range");
  const auto [file, i] = reader.locate(index);
  return nb::make_tuple(file->path(), i);
}

nb::tuple last_commit(const Reader& reader, std::int64_t number) {
  const auto* const file = dynamic_cast<const V2File*>(&file_at(reader, number));
  if (file == nullptr) throw nb::type_error("a v1 file has no commits");
  nb::list runs;
  const V2Index& index = file->index();
  for (const Run& run : index.runs()) runs.append(nb::make_tuple(run.first, run.place, run.count));
  const V2Slot& commit = index.commit();
  return nb::make_tuple(index.alignment(), commit.commit, commit.footer, commit.end, commit.samples, index.slot_place(),
                        index.slot_torn(), runs);
}

nb::bytes part(const Reader& reader, std::int64_t number, std::int64_t start, std::int64_t end) {
  const RecordFile& file = file_at(reader, number);
  if (start < 0 || start > end || end > file.size()) throw std::out_of_range("the byte range is outside the file");
  std::string data(static_cast<std::size_t>(end - start), '\0');
  {
    const nb::gil_scoped_release release;
    file.read(data.data(), data.size(), start);
  }
  return nb::bytes(data.data(), data.size());
}

std::int64_t size_of_file(const Reader& reader, std::int64_t file) { return file_at(reader, file).size(); }

std::vector<int> versions(const Reader& reader) {
  std::vector<int> found;
  for (const auto& file : reader.files()) found.push_back(file->version());
  return found;
}

nb::bytes schema(const Reader& reader, std::int64_t file) {
  const std::string json = file_at(reader, file).schema();
  return nb::bytes(json.data(), json.size());
}

std::vector<std::string> unchecked(const Reader& reader) {
  std::vector<std::string> paths;
  for (const auto& file : reader.files())
    if (!file->metadata_checked()) paths.push_back(file->path());
  return paths;
}

using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void make_index(V2Index* self, const std::string& name, std::int64_t size, const nb::callable& read,
                const nb::callable& size_now) {
  const auto fill = [&read](void* data, std::size_t wanted, std::int64_t offset) {
    const auto found = nb::cast<nb::bytes>(read(offset, offset + static_cast<std::int64_t>(wanted)));
    if (found.size() != wanted) throw nb::value_error("`read` returned another number of bytes");
    std::memcpy(data, found.c_str(), wanted);
  };
  new (self) V2Index(name, size, {[&size_now] { return nb::cast<std::int64_t>(size_now()); }, fill});
}

void check_in(const V2Index& index, const Indices& samples) {
  for (std::size_t i = 0; i < samples.size(); ++i)
    if (samples(i) < 0 || samples(i) >= index.count()) throw std::out_of_range("a sample index is out of range");
}

Array<std::int64_t> pages_of(const V2Index& index, const Indices& samples) {
  check_in(index, samples);
  auto places = std::make_unique_for_overwrite<std::int64_t[]>(samples.size());
  for (std::size_t i = 0; i < samples.size(); ++i) places[i] = index.place(samples(i)).offset;
  return adopt(std::move(places), samples.size());
}

Array<std::uint8_t> extents_by(const V2Index& index, const Indices& samples, const Indices& places,
                               const Bytes& pages) {
  check_in(index, samples);
  const std::size_t bytes = samples.size() * sizeof(Extent);
  if (pages.size() != places.size() * sizeof(V2Page)) throw nb::value_error("expected one page for each place");
  if (reinterpret_cast<std::uintptr_t>(pages.data()) % alignof(V2Page) != 0)
    throw nb::value_error("the pages are not aligned");
  auto data = std::make_unique_for_overwrite<std::uint8_t[]>(bytes);
  {
    const nb::gil_scoped_release release;
    std::vector<bool> checked(places.size());
    for (std::size_t i = 0; i < samples.size(); ++i) {
      const V2Index::Place place = index.place(samples(i));
      const std::int64_t* const end = places.data() + places.size();
      const std::int64_t* const at = std::lower_bound(places.data(), end, place.offset);
      if (at == end || *at != place.offset) throw std::out_of_range("the page of a sample is missing");
      const auto number = static_cast<std::size_t>(at - places.data());
      const auto& page = *reinterpret_cast<const V2Page*>(pages.data() + number * sizeof(V2Page));
      if (!checked[number]) index.check(page, place);
      checked[number] = true;
      const Extent extent = index.entry(page, place, samples(i));
      std::memcpy(data.get() + i * sizeof extent, &extent, sizeof extent);
    }
  }
  return adopt(std::move(data), bytes);
}

// Memory of batches that Python assembles.
class Arenas {
 public:
  ~Arenas() { pool_->close(); }
  nb::object take(std::size_t bytes) const {
    Arena arena;
    {
      const nb::gil_scoped_release release;
      arena = pool_->take(bytes);
    }
    return adopt(std::move(arena), bytes);
  }

 private:
  std::shared_ptr<ff::ffrecord::ArenaPool> pool_ = std::make_shared<ff::ffrecord::ArenaPool>();
};

using Target = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const std::int64_t, nb::shape<-1, 5>, nb::c_contig, nb::device::cpu>;

Array<std::uint8_t> copied(const std::vector<std::uint8_t>& from) {
  auto data = std::make_unique_for_overwrite<std::uint8_t[]>(from.size());
  std::copy(from.begin(), from.end(), data.get());
  return adopt(std::move(data), from.size());
}

nb::tuple read_pieces(const std::string& directory, const std::vector<std::string>& keys, const Table& table,
                      const Target& arena) {
  std::vector<ff::ffrecord::ChunkPiece> pieces(table.shape(0));
  if (!pieces.empty()) std::memcpy(pieces.data(), table.data(), pieces.size() * sizeof pieces[0]);
  const auto room = static_cast<std::int64_t>(arena.size()), files = static_cast<std::int64_t>(keys.size());
  for (const auto& piece : pieces) {
    const bool fits = piece.key >= 0 && piece.key < files && piece.first >= 0 && piece.bytes >= 0 &&
                      piece.bytes <= room && piece.target >= 0 && piece.target <= room - piece.bytes;
    if (!fits) throw std::out_of_range("a piece lies outside the arena or has no key");
  }
  ff::ffrecord::PiecesRead result;
  {
    const nb::gil_scoped_release release;
    result = ff::ffrecord::read_pieces(directory, keys, pieces, arena.data());
  }
  return nb::make_tuple(copied(result.found), result.error);
}

Array<std::uint8_t> check_samples(const Bytes& arena, const Indices& offsets,
                                  const nb::ndarray<const std::uint32_t, nb::ndim<1>, nb::c_contig>& crcs) {
  const std::size_t count = crcs.size();
  bool fits = offsets.size() == count + 1 && offsets(0) >= 0;
  for (std::size_t i = 0; fits && i < count; ++i) fits = offsets(i) <= offsets(i + 1);
  if (!fits || offsets(count) > static_cast<std::int64_t>(arena.size()))
    throw std::out_of_range("invalid offsets: expected ascending offsets inside the arena");
  std::vector<std::uint8_t> right;
  {
    const nb::gil_scoped_release release;
    right = ff::ffrecord::check_samples(arena.data(), offsets.data(), crcs.data(), count);
  }
  return copied(right);
}

void bind_remote(nb::module_& m) {
  nb::class_<V2Index>(m, "V2Index", "Metadata of a v2 file whose bytes the caller reads; thread-safe.")
      .def("__init__", &make_index, nb::arg("name"), nb::arg("size"), nb::arg("read"), nb::arg("size_now"),
           nb::sig("def __init__(self, name: str, size: int, read: collections.abc.Callable[[int, int], bytes], "
                   "size_now: collections.abc.Callable[[], int]) -> None"),
           "`read(start, end)` returns bytes of the file. `size_now()` returns its current size; it is called only if "
           "the file seems to have grown.")
      .def_prop_ro("count", &V2Index::count)
      .def_prop_ro("end", &V2Index::end)
      .def_prop_ro("schema",
                   [](const V2Index& index) { return nb::bytes(index.schema().data(), index.schema().size()); })
      .def("pages", &pages_of, nb::arg("indices"),
           nb::sig("def pages(self, indices: numpy.typing.NDArray[numpy.int64]) -> "
                   "numpy.typing.NDArray[numpy.int64]"),
           "Offset in the file of each sample's index page (4096 bytes).")
      .def("extents", &extents_by, nb::arg("indices"), nb::arg("places"), nb::arg("pages"),
           nb::sig("def extents(self, indices: numpy.typing.NDArray[numpy.int64], "
                   "places: numpy.typing.NDArray[numpy.int64], pages: numpy.typing.NDArray[numpy.uint8]) -> "
                   "numpy.typing.NDArray[numpy.uint8]"),
           "Returns the samples' index entries, 32 bytes each. `pages`: their index pages, each of which is checked; "
           "`places`: the ascending places of these pages.");
  nb::class_<Arenas>(m, "Arenas", "Memory for batches, reused after the last array on it is destroyed; thread-safe.")
      .def(nb::init<>())
      .def("take", &Arenas::take, nb::arg("bytes"),
           nb::sig("def take(self, bytes: int) -> numpy.typing.NDArray[numpy.uint8]"));
  m.def("chunk_name", &ff::ffrecord::chunk_name, nb::arg("key"), nb::arg("chunk"), "Path of a chunk in its cache.");
  m.def("read_pieces", &read_pieces, nb::arg("directory"), nb::arg("keys"), nb::arg("pieces"), nb::arg("arena"),
        nb::sig("def read_pieces(directory: str, keys: collections.abc.Sequence[str], "
                "pieces: numpy.typing.NDArray[numpy.int64], arena: numpy.typing.NDArray[numpy.uint8]) -> "
                "tuple[numpy.typing.NDArray[numpy.uint8], int]"),
        "Fills pieces from chunk files. A row of `pieces`: index of the key, chunk, first byte, bytes, place in the "
        "arena. Returns 1 for each piece that was read whole (0 for others), and the errno of a failed read, or 0.");
  m.def("check_samples", &check_samples, nb::arg("arena"), nb::arg("offsets"), nb::arg("crcs"),
        nb::sig("def check_samples(arena: numpy.typing.NDArray[numpy.uint8], "
                "offsets: numpy.typing.NDArray[numpy.int64], crcs: numpy.typing.NDArray[numpy.uint32]) -> "
                "numpy.typing.NDArray[numpy.uint8]"),
        "Returns 1 for each sample whose CRC32 matches, 0 for others.");
}

}  // namespace

void ff::ffrecord::bind(nb::module_ m) {
  m.doc() = "Random batch reads of FFRecord files.";
  nb::class_<Reader>(m, "Reader", "Open record files, their samples numbered as one sequence; thread-safe.")
      .def("__init__", &make_reader, nb::arg("paths"), nb::arg("check_data"), nb::arg("strategy") = "auto",
           nb::arg("threads") = 0)
      .def_prop_ro("n", &Reader::count)
      .def("read", &read_batch, nb::arg("indices"),
           nb::sig("def read(self, indices: numpy.typing.NDArray[numpy.int64]) -> "
                   "tuple[numpy.typing.NDArray[numpy.uint8], numpy.typing.NDArray[numpy.int64]]"),
           "Returns one arena and the k + 1 offsets of the k samples in it, in the order of `indices`.")
      .def("read_list", &read_list, nb::arg("indices"),
           nb::sig("def read_list(self, indices: numpy.typing.NDArray[numpy.int64]) -> "
                   "list[numpy.typing.NDArray[numpy.uint8]]"),
           "The samples as views on one new arena.")
      .def("read_views", &read_views, nb::arg("indices"),
           nb::sig("def read_views(self, indices: numpy.typing.NDArray[numpy.int64]) -> "
                   "list[numpy.typing.NDArray[numpy.uint8]]"),
           "The samples as read-only views on the mapped files, each checked once.")
      .def("check_all", &Reader::check_all, nb::call_guard<nb::gil_scoped_release>(),
           "Reads every file completely and compares every checksum.")
      .def("unchecked", &unchecked, "Files whose metadata carries no checksum.")
      .def("versions", &versions, "Version of the format of each file.")
      .def("schema", &schema, nb::arg("file"), "The columns of one file as JSON; empty if it has none.")
      .def("size", &size_of_file, nb::arg("file"), "Bytes of one file up to the end of its last commit.")
      .def("part", &part, nb::arg("file"), nb::arg("start"), nb::arg("end"),
           "Bytes of one file as it was opened, even if its path was replaced since.")
      .def("locate", &locate, nb::arg("index"), nb::sig("def locate(self, index: int) -> tuple[str, int]"),
           "The file of a sample and its number in that file.")
      .def("extents", &extents, nb::arg("indices"),
           nb::sig("def extents(self, indices: numpy.typing.NDArray[numpy.int64]) -> "
                   "numpy.typing.NDArray[numpy.uint8]"),
           "Index entries in the layout of v2, 32 bytes each, in the order of `indices`; also for v1 files.")
      .def("last_commit", &last_commit, nb::arg("file"),
           nb::sig("def last_commit(self, file: int) -> "
                   "tuple[int, int, int, int, int, int, bool, list[tuple[int, int, int]]]"),
           "The last commit of a v2 file: alignment, commit number, footer offset, end, samples, slot offset, whether "
           "that slot is torn, and the runs. A run: (first sample, offset of the first index page, samples).")
      .def("offsets", &offsets, nb::arg("file"),
           nb::sig("def offsets(self, file: int) -> numpy.typing.NDArray[numpy.int64]"),
           "Start of each sample of one file in bytes, and the size of the file.")
      .def("checksums", &checksums, nb::arg("file"),
           nb::sig("def checksums(self, file: int) -> numpy.typing.NDArray[numpy.uint32]"),
           "CRC32 of each sample of one file.");
  bind_remote(m);
  m.def("arena_bytes", &ff::ffrecord::Block::in_process, "Memory of all arenas of this process, in use or kept.");
}
