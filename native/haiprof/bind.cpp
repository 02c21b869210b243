// Python binding of the profiler's hooks: `fireflyer._native.haiprof`. Hooks run many times in a training step, so they
// are native: a hook reads the clock once and writes one word. The GIL serialises all calls.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <cstdint>
#include <ctime>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "haiprof/event_log.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ff::haiprof {

void bind(nb::module_ m);

namespace {

// An EventLog and its clock. Hooks that are still in place while `active` is false do nothing.
class Log {
 public:
  Log(std::size_t most, std::optional<nb::callable> clock) : events_(most), clock_(std::move(clock)), base_(read()) {}

  bool active = false;

  std::int64_t base() const { return base_; }
  EventLog& events() { return events_; }

  void mark(std::uint64_t code) { events_.put(read() - base_, code, PyThread_get_thread_ident()); }
  void put(bool begin, unsigned phase, unsigned label) { mark(EventLog::code(begin, phase, label)); }
  void report(unsigned phase, std::int64_t nanoseconds) {
    events_.put(nanoseconds, EventLog::code(true, phase, 0), PyThread_get_thread_ident());
  }

  nb::bytes drain() {
    const std::vector<std::uint64_t>& words = events_.words();
    nb::bytes taken(reinterpret_cast<const char*>(words.data()), words.size() * sizeof(std::uint64_t));
    events_.clear();
    return taken;
  }

 private:
  std::int64_t read() const {
    if (clock_) {
      const nb::error_scope kept;  // keeps the pending exception of a call that failed
      return nb::cast<std::int64_t>((*clock_)());
    }
    timespec now{};
    ::clock_gettime(CLOCK_MONOTONIC, &now);
    return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
  }

  EventLog events_;
  std::optional<nb::callable> clock_;
  std::int64_t base_;
};

// Wraps a function: records when its calls begin and end, and forwards everything else to it.
struct Timed {
  Log& log;
  nb::object function;
  std::optional<nb::callable> note;  // called with the arguments of each call
  std::uint64_t first, last;         // codes of the events at the beginning and the end of a call
  bool outermost;                    // calls inside another such call of the same thread are not recorded

  static Timed& of(PyObject* self) { return *nb::inst_ptr<Timed>(nb::handle(self)); }

  static PyObject* call(PyObject* self, PyObject* args, PyObject* kwargs) {
    Timed& timed = of(self);
    EventLog& events = timed.log.events();
    const std::uint64_t thread = PyThread_get_thread_ident();
    if (!timed.log.active || (timed.outermost && events.inside(thread))) {
      return PyObject_Call(timed.function.ptr(), args, kwargs);
    }
    if (timed.note) timed.tell(args, kwargs);
    const nb::object held = nb::borrow(self);  // the session may end, and drop this hook, during the call
    if (timed.outermost) events.enter(thread, true);
    timed.log.mark(timed.first);
    PyObject* result = PyObject_Call(timed.function.ptr(), args, kwargs);
    timed.log.mark(timed.last);
    if (timed.outermost) events.enter(thread, false);
    return result;
  }

  // An error of the profiler must not reach the program.
  void tell(PyObject* args, PyObject* kwargs) const {
    PyObject* none[] = {args, kwargs == nullptr ? Py_None : kwargs};
    PyObject* answer = PyObject_Vectorcall(note->ptr(), none, 2, nullptr);
    if (answer == nullptr) PyErr_Clear();
    Py_XDECREF(answer);
  }

  static PyObject* bind_to(PyObject* self, PyObject* object, PyObject*) {
    return object == nullptr || object == Py_None ? Py_NewRef(self) : PyMethod_New(self, object);
  }

  static PyObject* attribute(PyObject* self, PyObject* name) {
    const char* text = PyUnicode_AsUTF8(name);
    if (text == nullptr) return nullptr;
    const std::string_view view = text;
    if (view == "__wrapped__") return Py_NewRef(of(self).function.ptr());
    const bool own = view == "__class__" || view == "__reduce__" || view == "__reduce_ex__";
    return own ? PyObject_GenericGetAttr(self, name) : PyObject_GetAttr(of(self).function.ptr(), name);
  }

  static int set_attribute(PyObject* self, PyObject* name, PyObject* value) {
    return PyObject_SetAttr(of(self).function.ptr(), name, value);
  }
};

PyType_Slot timed_slots[] = {
    {Py_tp_call, reinterpret_cast<void*>(&Timed::call)},
    {Py_tp_descr_get, reinterpret_cast<void*>(&Timed::bind_to)},
    {Py_tp_getattro, reinterpret_cast<void*>(&Timed::attribute)},
    {Py_tp_setattro, reinterpret_cast<void*>(&Timed::set_attribute)},
    {0, nullptr},
};

// Hooks around the steps of optimizers. `label_of` numbers a new optimizer. `at_step(steps since its last call)`
// returns the number of steps until its next call.
class Updates {
 public:
  Updates(Log& log, unsigned phase, nb::callable label_of, nb::callable at_step)
      : log_(log), phase_(phase), label_of_(std::move(label_of)), at_step_(std::move(at_step)) {}

  void before(nb::handle optimizer, nb::handle, nb::handle) {
    if (log_.active) log_.put(true, phase_, label(optimizer));
  }

  void after(nb::handle optimizer, nb::handle, nb::handle) {
    if (!log_.active) return;
    if (++steps_ >= next_) next_ = nb::cast<std::int64_t>(at_step_(std::exchange(steps_, 0)));
    log_.put(false, phase_, label(optimizer));
  }

 private:
  unsigned label(nb::handle optimizer) {
    for (const auto& [known, number] : labels_) {
      if (known == optimizer.ptr()) return number;
    }
    const auto number = nb::cast<unsigned>(label_of_(optimizer));
    labels_.emplace_back(optimizer.ptr(), number);
    return number;
  }

  Log& log_;
  unsigned phase_;
  nb::callable label_of_, at_step_;
  std::int64_t steps_ = 0, next_ = 1;
  std::vector<std::pair<PyObject*, unsigned>> labels_;
};

Timed timed(Log& log, nb::object function, unsigned phase, unsigned label, std::optional<nb::callable> note,
            bool outermost) {
  return {log,
          std::move(function),
          std::move(note),
          EventLog::code(true, phase, label),
          EventLog::code(false, phase, label),
          outermost};
}

}  // namespace

void bind(nb::module_ m) {
  m.doc() = "Hooks of the profiler, and the events that they record.";
  nb::class_<Log>(m, "EventLog", "Events of one session, and their clock.")
      .def(nb::init<std::size_t, std::optional<nb::callable>>(), "most"_a, "clock"_a = nb::none(),
           nb::sig("def __init__(self, most: int, clock: collections.abc.Callable[[], int] | None = None) -> None"),
           "Keeps at most `most` events. The default `clock` is the monotonic one.")
      .def_rw("active", &Log::active, "True during the session. While false, hooks record nothing.")
      .def_prop_ro("base_ns", &Log::base, "Clock at the start of the session; times of events are relative to it.")
      .def_prop_ro(
          "dropped", [](Log& log) { return log.events().dropped(); },
          "Number of events that were dropped because the log was full.")
      .def("put", &Log::put, "begin"_a, "phase"_a, "label"_a, "Records that a phase begins or ends now.")
      .def("report", &Log::report, "phase"_a, "nanoseconds"_a, "Records a duration instead of a moment.")
      .def("drain", &Log::drain, "Removes all events so far and returns them in the wire format.");
  nb::class_<Timed>(m, "Timed", nb::type_slots(timed_slots),
                    "Wrapper of a function that records when its calls begin and end.")
      .def(
          "__reduce__", [](const Timed& self) { return self.function.attr("__qualname__"); },
          nb::sig("def __reduce__(self) -> str"));
  m.def("timed", &timed, "log"_a, "function"_a, "phase"_a, "label"_a, "note"_a = nb::none(), "outermost"_a = false,
        nb::keep_alive<0, 1>(),
        nb::sig("def timed(log: EventLog, function: object, phase: int, label: int, "
                "note: collections.abc.Callable[[tuple[object, ...], dict[str, object] | None], object] | None = None, "
                "outermost: bool = False) -> Timed"),
        "Returns a wrapper of `function`. `note` is called with the positional and named arguments of each call. "
        "`outermost`: calls inside another such call of the same thread are not recorded.");
  nb::class_<Updates>(m, "Updates", "Hooks around the steps of optimizers.")
      .def(nb::init<Log&, unsigned, nb::callable, nb::callable>(), "log"_a, "phase"_a, "label_of"_a, "at_step"_a,
           nb::keep_alive<1, 2>(),
           nb::sig("def __init__(self, log: EventLog, phase: int, label_of: collections.abc.Callable[[object], int], "
                   "at_step: collections.abc.Callable[[int], int]) -> None"),
           "`label_of` numbers an optimizer. `at_step(steps since its last call)` returns the number of steps until "
           "its next call.")
      .def("before", &Updates::before, "optimizer"_a, "args"_a, "kwargs"_a, "Hook before a step.")
      .def("after", &Updates::after, "optimizer"_a, "args"_a, "kwargs"_a, "Hook after a step.");
}

}  // namespace ff::haiprof
