#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace ff::fs3::store {

void bind(nb::module_ m);

void bind(nb::module_ m) { static_cast<void>(m); }

}  // namespace ff::fs3::store
