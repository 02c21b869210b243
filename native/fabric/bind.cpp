// Python binding of the flows of a network: `fireflyer._native.fabric`. The solver runs without the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <memory>
#include <span>
#include <vector>

#include "fabric/flows.hpp"

namespace nb = nanobind;
using ff::fabric::Flows;

namespace ff::fabric { void bind(nb::module_ m); }

namespace {

template <typename T>
using Input = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Output = nb::ndarray<nb::numpy, double, nb::ndim<1>>;

template <typename T>
std::span<const T> view(const Input<T>& array) {
  return {array.data(), array.size()};
}

Output copied(const std::vector<double>& values) {
  auto data = std::make_unique_for_overwrite<double[]>(values.size() + 1);
  std::copy(values.begin(), values.end(), data.get());
  double* const pointer = data.get();
  nb::capsule owner(pointer, [](void* p) noexcept { delete[] static_cast<double*>(p); });
  static_cast<void>(data.release());
  return Output(pointer, {values.size()}, owner);
}

void construct(Flows* self, const Input<double>& capacities, const Input<std::int64_t>& begin,
               const Input<std::int32_t>& links, const Input<double>& bytes) {
  const nb::gil_scoped_release release;
  new (self) Flows(view(capacities), view(begin), view(links), view(bytes));
}

}  // namespace

void ff::fabric::bind(nb::module_ m) {
  m.doc() = "The network: max-min fair flows over time.";
  nb::class_<Flows>(m, "Flows", "Flows over links with max-min fair rates. Only one thread at a time may use it.")
      .def("__init__", &construct, nb::arg("capacities"), nb::arg("begin"), nb::arg("links"), nb::arg("bytes"),
           "Flow i uses links[begin[i]:begin[i + 1]] and carries bytes[i]; capacities are bytes a second.")
      .def("run", &Flows::run, nb::arg("until"), nb::arg("merge"), nb::call_guard<nb::gil_scoped_release>(),
           "Runs to the time `until`, in seconds. If a flow ends at time t, all flows that end by t * (1 + merge) end "
           "in the same event.")
      .def(
          "rates", [](const Flows& flows) { return copied(flows.rates()); }, "Bytes a second of each flow.")
      .def(
          "ends", [](const Flows& flows) { return copied(flows.ends()); },
          "Time at which each flow ended, in seconds; infinity if it has not.")
      .def(
          "left", [](const Flows& flows) { return copied(flows.left()); }, "Bytes that each flow still carries.")
      .def_prop_ro("now", &Flows::now)
      .def_prop_ro("events", &Flows::events, "Number of times that rates were computed.");
}
