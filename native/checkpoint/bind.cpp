// Python bindings of staging: `fireflyer._native.checkpoint`. Every call that copies or waits releases the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/unique_ptr.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "checkpoint/arena.hpp"
#include "checkpoint/copy.hpp"
#include "checkpoint/device_copy.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ff::checkpoint {

void bind(nb::module_ m);

namespace {

using GilReleased = nb::call_guard<nb::gil_scoped_release>;
using Rows = nb::ndarray<const std::int64_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;

// Returns the arena's memory; throws if the arena is empty.
std::shared_ptr<const Memory> memory_of(const Arena& arena) {
  auto memory = arena.memory();
  if (!memory) throw Error(Code::invalid, "the arena is empty: call reserve() first, also in a forked child");
  return memory;
}

nb::object view(const Arena& arena, std::size_t size) {
  auto kept = std::make_unique<std::shared_ptr<const Memory>>(memory_of(arena));
  const Memory& memory = **kept;
  if (size > memory.size())
    throw Error(Code::invalid,
                "the arena has " + std::to_string(memory.size()) + " bytes, not " + std::to_string(size));
  nb::capsule owner(kept.get(), [](void* p) noexcept { delete static_cast<std::shared_ptr<const Memory>*>(p); });
  static_cast<void>(kept.release());
  using View = nb::ndarray<nb::memview, std::uint8_t, nb::ndim<1>>;
  return nb::cast(View(memory.data(), {size}, owner));
}

std::vector<Piece> pieces_of(const Rows& rows) {
  std::vector<Piece> pieces;
  pieces.reserve(rows.shape(0));
  for (std::size_t i = 0; i < rows.shape(0); ++i) {
    const std::int64_t* const row = rows.data() + 3 * i;
    if (row[1] < 0 || row[2] < 0)
      throw Error(Code::invalid, "piece " + std::to_string(i) + " has a negative offset or length");
    pieces.push_back(
        {reinterpret_cast<const char*>(row[0]), static_cast<std::size_t>(row[1]), static_cast<std::size_t>(row[2])});
  }
  return pieces;
}

std::unique_ptr<Copy> start(const Arena& arena, const Rows& rows, unsigned threads, bool compare, bool background) {
  std::vector<Piece> pieces = pieces_of(rows);
  const auto memory = memory_of(arena);
  const nb::gil_scoped_release release;
  return std::make_unique<Copy>(memory, std::move(pieces),
                                CopyOptions{.threads = threads, .compare = compare, .background = background});
}

// Owner that destroys the copy without the GIL: the destructor waits for the user's stream, whose work may need Python.
class HeldDeviceCopy {
 public:
  explicit HeldDeviceCopy(std::unique_ptr<DeviceCopy> copy) : copy_(std::move(copy)) {}
  HeldDeviceCopy(HeldDeviceCopy&&) = default;
  ~HeldDeviceCopy() {
    if (!copy_) return;
    const nb::gil_scoped_release release;
    copy_ = nullptr;
  }
  DeviceCopy& operator*() const { return *copy_; }
  DeviceCopy* operator->() const { return copy_.get(); }

 private:
  std::unique_ptr<DeviceCopy> copy_;
};

HeldDeviceCopy start_on_device(const std::shared_ptr<DeviceLane>& lane, const Arena& arena, const Rows& rows,
                               DeviceLane::Device::Stream stream, bool compare, bool follow) {
  std::vector<Piece> pieces = pieces_of(rows);
  const auto memory = memory_of(arena);
  const DeviceCopyOptions options{.compare = compare, .follow = follow};
  const nb::gil_scoped_release release;
  return HeldDeviceCopy(std::make_unique<DeviceCopy>(lane, memory, std::move(pieces), stream, options));
}

template <class AnyCopy>
nb::ndarray<nb::numpy, bool, nb::ndim<1>> changed(const AnyCopy& copy) {
  if (!copy.compares()) throw Error(Code::invalid, "the copy was started without compare=True");
  auto data = std::make_unique<bool[]>(copy.pieces());
  for (std::size_t i = 0; i < copy.pieces(); ++i) data[i] = copy.changed(i);
  bool* const pointer = data.get();
  nb::capsule owner(pointer, [](void* p) noexcept { delete[] static_cast<bool*>(p); });
  static_cast<void>(data.release());
  return {pointer, {copy.pieces()}, owner};
}

void bind_device_copy(nb::module_ m) {
  nb::class_<HeldDeviceCopy>(m, "DeviceCopy",
                             "Copy in flight from a device into an arena. Destroying it waits for the work in the "
                             "device's stream.")
      .def(
          "wait",
          [](const HeldDeviceCopy& copy, std::optional<std::size_t> upto) { copy->wait(upto.value_or(SIZE_MAX)); },
          "upto"_a = nb::none(), GilReleased(),
          "Waits until the pieces' bytes in [0, upto) of the arena are in place (default: all). Raises "
          "CollectiveError if the device has failed, Cancelled in a forked child.")
      .def_prop_ro(
          "staged", [](const HeldDeviceCopy& copy) { return copy->staged(); },
          "The pieces' bytes in [0, staged) of the arena are in place.")
      .def_prop_ro(
          "done", [](const HeldDeviceCopy& copy) { return copy->done(); },
          "True when all pieces are in place and no source is read any more.")
      .def(
          "changed", [](const HeldDeviceCopy& copy) { return changed(*copy); },
          "bool[n]: true for pieces that differ from the arena's previous contents. Call it after wait(), on a copy "
          "with compare=True.");
  nb::class_<DeviceLane>(m, "DeviceLane", "A stream of a device on which copies into arenas run.")
      .def(nb::init<DeviceLane::Device&>(), "device"_a, GilReleased())
      .def("start", &start_on_device, "arena"_a, "pieces"_a, "stream"_a, "compare"_a = false, "follow"_a = false,
           "Starts to copy pieces of the device's memory after the current work in `stream`. `pieces`: int64[n, 3] of "
           "(address of the source, offset in the arena, bytes), ascending by offset and disjoint. The sources must "
           "stay alive and unchanged until the copy is done. compare: compare with the arena's contents, see "
           "DeviceCopy.changed(). follow: `stream` waits for the copy. Raises CollectiveError if the device reports "
           "an error.");
}

}  // namespace

void bind(nb::module_ m) {
  m.doc() = "Staging of checkpoints: the arena, and copies into it by native threads.";
  // ~Copy waits for the copy's threads with the GIL held: these threads never take the GIL.
  nb::class_<Copy>(m, "Copy",
                   "Copy in flight into an arena. Destroying it skips blocks that have not begun and waits for the "
                   "others.")
      .def(
          "wait",
          [](Copy& copy, std::optional<std::size_t> upto, bool help) { copy.wait(upto.value_or(SIZE_MAX), help); },
          "upto"_a = nb::none(), "help"_a = true, GilReleased(),
          "Waits until the pieces' bytes in [0, upto) of the arena are in place (default: all). With `help`, the "
          "calling thread copies, too. Raises Cancelled in a forked child.")
      .def_prop_ro("staged", &Copy::staged, "The pieces' bytes in [0, staged) of the arena are in place.")
      .def_prop_ro("done", &Copy::done, "True when all pieces are in place and no source is read any more.")
      .def_prop_ro("pieces_done", &Copy::pieces_done, "Number of leading pieces that are in place.")
      .def("changed", &changed<Copy>,
           "bool[n]: true for pieces that differ from the arena's previous contents. Call it after wait(), on a copy "
           "with compare=True.");
  nb::class_<Arena>(m, "Arena", "Memory kept from save to save. Only one thread at a time may use it.")
      .def(nb::init<>())
      .def("reserve", &Arena::reserve, "size"_a, GilReleased(),
           "Makes the arena at least `size` bytes large and populates all pages. The arena's bytes are lost when it "
           "grows; views and copies of the old memory stay valid. Raises NoSpace if memory is short.")
      .def("memory", &view, "size"_a, nb::sig("def memory(self, size: int) -> memoryview"),
           "Returns a writable, page-aligned view on the first `size` bytes, which keeps them alive.")
      .def(
          "pin",
          [](const Arena& arena, hfreduce::Device& device) {
            const auto memory = memory_of(arena);
            const nb::gil_scoped_release release;
            memory->pin(device);
          },
          "device"_a,
          "Pins the memory for the device, until the memory is freed or replaced by a larger one. A second call does "
          "nothing. Raises CollectiveError if the device reports an error.")
      .def_prop_ro(
          "capacity",
          [](const Arena& arena) {
            const auto memory = arena.memory();
            return memory ? memory->size() : 0;
          },
          "Bytes; 0 before the first reserve() and in a forked child.")
      .def("start", &start, "pieces"_a, "threads"_a = 0, "compare"_a = false, "background"_a = false,
           "Starts to copy pieces on native threads (0: one for each core). `pieces`: int64[n, 3] of (address of the "
           "source, offset in the arena, bytes), ascending by offset and disjoint. The sources must stay alive and "
           "unchanged until the copy is done or destroyed. compare: compare with the arena's contents, see "
           "Copy.changed(). background: only one thread copies, on idle cores, until a caller waits with `help`.");
  bind_device_copy(m);
}

}  // namespace ff::checkpoint
