#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>
#include <sys/prctl.h>

#include <string_view>

#include "base/error.hpp"
#include "hai/process_title.hpp"
#include "hai/suspend_page.hpp"

namespace nb = nanobind;
using ff::hai::SuspendPage;

namespace ff::hai { void bind(nb::module_ m); }

namespace {

// A signal during the wait runs its Python handler, and an exception of the handler ends the call.
bool call(SuspendPage& page, std::size_t slot) {
  bool frozen = false;
  const std::uint64_t number = page.begin_call(slot, frozen);
  if (!frozen) return false;
  for (;;) {
    SuspendPage::Wait outcome;
    {
      const nb::gil_scoped_release release;
      outcome = page.wait();
    }
    if (outcome == SuspendPage::Wait::decided) return page.answer(slot, number);
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
}

void set_child_subreaper() {
  if (::prctl(PR_SET_CHILD_SUBREAPER, 1) != 0) ff::throw_errno("cannot become a child subreaper");
}

void set_parent_death_signal(int signal) {
  if (::prctl(PR_SET_PDEATHSIG, signal) != 0) ff::throw_errno("cannot set the parent death signal");
}

void show_title(const nb::bytes& arguments, const nb::bytes& environment) {
  ff::hai::set_process_title({arguments.c_str(), arguments.size()}, {environment.c_str(), environment.size()});
}

}  // namespace

void ff::hai::bind(nb::module_ m) {
  m.doc() = "The platform: suspend page and process controls.";
  nb::class_<SuspendPage>(m, "SuspendPage",
                          "Page of a node with the number of `suspend_requested()` calls of each rank, and the number "
                          "of the first call that returns true.")
      .def_static("create", &SuspendPage::create, nb::arg("slots"), "Creates a page for `slots` ranks in a new memfd.")
      .def_static("map", &SuspendPage::map, nb::arg("fd"), "Maps the page behind `fd`, which the caller still owns.")
      .def("call", &call, nb::arg("slot"),
           "Counts a call. Returns false at once before a freeze; after it, waits for the decision without the GIL.")
      .def("acknowledge", &SuspendPage::acknowledge, nb::arg("slot"),
           "Records that the rank in `slot` has saved its state and will exit.")
      .def("set_apart", &SuspendPage::set_apart, nb::arg("slot"),
           "Answers the slot's calls false, uncounted, until `begin`.")
      .def("begin", &SuspendPage::begin, nb::arg("slot"), nb::arg("count"),
           "Gives the next call the number `count` + 1; `count` is below 2**62.")
      .def("join", &SuspendPage::join, nb::arg("slot"), "Records that the new rank in `slot` is a member.")
      .def("renew", &SuspendPage::renew, nb::arg("slot"), "Prepares the slot for a new rank, and sets it apart.")
      .def("freeze", &SuspendPage::freeze, "Freezes every slot; returns the counts of answered calls.")
      .def("decide", &SuspendPage::decide, nb::arg("number"),
           "Sets the decision unless there is one; returns the decision in force.")
      .def("count", &SuspendPage::count, nb::arg("slot"), "Calls begun by the rank in `slot`.")
      .def(
          "told", [](const SuspendPage& p, std::size_t s) { return (p.flags(s) & SuspendPage::told) != 0; },
          nb::arg("slot"), "True if a call of the rank in `slot` was answered with true.")
      .def(
          "acknowledged",
          [](const SuspendPage& p, std::size_t s) { return (p.flags(s) & SuspendPage::acknowledged) != 0; },
          nb::arg("slot"), "True if the rank in `slot` acknowledged.")
      .def(
          "joined", [](const SuspendPage& p, std::size_t s) { return (p.flags(s) & SuspendPage::joined) != 0; },
          nb::arg("slot"), "True if the new rank in `slot` has become a member.")
      .def_prop_ro("decision", &SuspendPage::decision, "Number of the first call that returns true; 0: undecided.")
      .def_prop_ro("slots", &SuspendPage::slots)
      .def_prop_ro("fd", &SuspendPage::fd, "The memfd of a created page; -1 for a mapped one.");
  m.def("set_child_subreaper", &set_child_subreaper,
        "Makes orphans among the descendants of this process its children.");
  m.def("set_parent_death_signal", &set_parent_death_signal, nb::arg("signal"),
        "Makes the kernel send `signal` to this process when its parent dies, also after execve.");
  m.def("set_process_title", &show_title, nb::arg("arguments"), nb::arg("environment"),
        "Sets the command line and the first environment variables that /proc shows, each ended by a NUL. The texts "
        "are cut to the space that execve left. An empty environment leaves the shown one. REQUIRES: one thread.");
}
