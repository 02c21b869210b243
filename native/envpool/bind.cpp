// Python binding of pools of environments: `fireflyer._native.envpool`. Only send() and receive() release the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/unique_ptr.h>

#include <cstdint>
#include <span>

#include "base/error.hpp"
#include "envpool/pool.hpp"

namespace nb = nanobind;
using ff::envpool::Pool;

namespace ff::envpool { void bind(nb::module_ m); }

namespace {

template <class T, int dimensions>
using Array = nb::ndarray<T, nb::ndim<dimensions>, nb::c_contig, nb::device::cpu>;

void require(bool right, const char* what) {
  if (!right) throw ff::Error(ff::Code::invalid, what);
}

void send(Pool& pool, const Array<const std::int32_t, 1>& ids, const Array<const double, 1>& actions) {
  const nb::gil_scoped_release release;
  pool.send({ids.data(), ids.size()}, {actions.data(), actions.size()});
}

void receive(Pool& pool, const Array<std::int32_t, 1>& ids, const Array<float, 2>& observations,
             const Array<double, 1>& rewards, const Array<bool, 1>& terminated, const Array<bool, 1>& truncated) {
  const std::size_t count = ids.size();
  require(observations.shape(0) == count && rewards.size() == count && terminated.size() == count &&
              truncated.size() == count && observations.shape(1) == static_cast<std::size_t>(pool.shape().observation),
          "invalid arrays: expected one row for each id, and the pool's width of observations");
  const nb::gil_scoped_release release;
  pool.receive({{ids.data(), count},
                observations.data(),
                rewards.data(),
                reinterpret_cast<std::uint8_t*>(terminated.data()),
                reinterpret_cast<std::uint8_t*>(truncated.data())});
}

bool fits(const Pool& pool, std::size_t rows, std::size_t columns) {
  return rows == static_cast<std::size_t>(pool.size()) && columns == static_cast<std::size_t>(pool.shape().state);
}

void states(const Pool& pool, const Array<double, 2>& out) {
  require(fits(pool, out.shape(0), out.shape(1)), "states have another shape");
  pool.states({out.data(), out.size()});
}

void set_states(Pool& pool, const Array<const double, 2>& given) {
  require(fits(pool, given.shape(0), given.shape(1)), "states have another shape");
  pool.set_states({given.data(), given.size()});
}

}  // namespace

void ff::envpool::bind(nb::module_ m) {
  m.doc() = "Pools of environments that a few threads step.";
  nb::class_<Pool>(m, "Pool", "Environments of one task. Only one thread at a time may use a pool.")
      .def("send", &send, nb::arg("ids"), nb::arg("actions"),
           "Queues a step of each environment; a reset if `actions` is empty.")
      .def("receive", &receive, nb::arg("ids"), nb::arg("observations"), nb::arg("rewards"), nb::arg("terminated"),
           nb::arg("truncated"), "Waits for as many stepped environments as the arrays hold, and fills the arrays.")
      .def("seed", &Pool::seed, nb::arg("seed"), "Restarts all streams of random numbers from a seed.")
      .def("states", &states, nb::arg("out"), "Copies the state of each environment.")
      .def("set_states", &set_states, nb::arg("states"), "Begins an episode of each environment in the given state.")
      .def_prop_ro(
          "state", [](const Pool& pool) { return pool.shape().state; }, "Number of doubles of a state.")
      .def_prop_ro(
          "observation", [](const Pool& pool) { return pool.shape().observation; },
          "Number of floats of an observation.");
  m.def("make", &Pool::make, nb::arg("task"), nb::arg("environments"), nb::arg("threads"), nb::arg("seed"),
        "Makes a pool of environments of one task.");
}
