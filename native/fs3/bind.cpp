// `fireflyer._native.fs3`: one submodule a folder, defined in native/fs3/<folder>/bind.cpp.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace ff::fs3 {

void bind(nb::module_ m);

namespace client { void bind(nb::module_ m); }
namespace io { void bind(nb::module_ m); }
namespace replica { void bind(nb::module_ m); }
namespace store { void bind(nb::module_ m); }

void bind(nb::module_ m) {
  client::bind(m.def_submodule("client", "The client's engine"));
  io::bind(m.def_submodule("io", "The storage service"));
  replica::bind(m.def_submodule("replica", "The replica's state machine, for simulations and tests"));
  store::bind(m.def_submodule("store", "Chunk stores on real and simulated disks"));
}

}  // namespace ff::fs3
