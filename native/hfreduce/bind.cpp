// Bindings of the collective engine. Whatever waits or moves tensor bytes releases the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/set.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "base/fork_guard.hpp"
#include "base/socket.hpp"
#include "hfreduce/arena.hpp"
#include "hfreduce/group.hpp"
#include "hfreduce/watch.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ff::hfreduce {
namespace {

using GilReleased = nb::call_guard<nb::gil_scoped_release>;
using Bytes = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>;

Bytes arena_block(std::size_t bytes) {
  char* block = nullptr;
  {
    const nb::gil_scoped_release release;
    block = Arena::of_process().allocate(bytes);
  }
  const nb::capsule owner(block, [](void* p) noexcept {
    Arena::of_process().release(static_cast<char*>(p));
  });
  return Bytes(block, {bytes}, owner);
}

std::unique_ptr<Team> make_team(int control, const std::vector<std::array<int, 3>>& members,
                                std::size_t me, bool spin) {
  std::vector<Member> list;
  for (const auto& [rank, socket, process] : members) list.push_back({rank, socket, process});
  return std::make_unique<Team>(Segment::attach(control), std::move(list), me, spin);
}

// Everything by number: sockets and descriptors were opened by Python and belong to the group from here on.
struct RingEnds {
  int next_socket, next_rank, previous_socket, previous_rank;
  std::size_t index;
};

void make_group(Group* self, int rank, int world, double timeout_s, bool spin, int control,
                const std::vector<std::array<int, 3>>& members, std::size_t me, std::size_t hosts,
                std::size_t lanes, const RingEnds* ring) {
  Group::Config config{rank, world, timeout_s, spin, hosts, lanes};
  auto team = members.size() > 1 ? make_team(control, members, me, spin) : nullptr;
  auto ends = ring == nullptr
                  ? nullptr
                  : std::make_unique<Ring>(Ring::End{ring->next_socket, ring->next_rank},
                                           Ring::End{ring->previous_socket, ring->previous_rank},
                                           ring->index, hosts);
  new (self) Group(config, std::move(team), std::move(ends));
}

// ---- Watch and the fork guard -------------------------------------------------------------------------
void bind_watch(nb::module_ m) {
  nb::class_<Watch>(m, "Watch", "Sees the death of any rank and tells everybody; one a group, with a thread.")
      .def(nb::init<int, int>(), nb::kw_only(), "rank"_a, "world"_a)
      .def("add_process", &Watch::add_process, "rank"_a, "pidfd"_a, GilReleased(),
           "Watches a process of this host; owns the descriptor.")
      .def("add_link", &Watch::add_link, "rank"_a, "socket"_a, GilReleased(),
           "Adds a duplex control link; owns the socket.")
      .def(
          "attach",
          [](Watch& watch, Group& group) {
            watch.listen({[&group](const Error& error) { group.fail(error); }, nullptr});
          },
          "group"_a, nb::keep_alive<1, 2>(), GilReleased(), "Fails `group` with the first failure.")
      .def(
          "announce",
          [](Watch& watch, const std::string& message, int rank) {
            const auto code = rank >= 0 ? Code::rank_failed : Code::collective;
            watch.announce(Error(code, message, rank));
          },
          "message"_a, "rank"_a = -1, GilReleased(),
          "Gives the group up on all ranks: because of `rank`, or for a reason of no single rank.")
      .def("leave", &Watch::leave, "operations"_a, "seconds"_a = 1.0, GilReleased(),
           "Says goodbye; waits at most `seconds` until the neighbours know.")
      .def("drop_links", &Watch::drop_links, GilReleased(), "Ends without a goodbye, as a death does.")
      .def("wait", &Watch::wait, "seconds"_a = -1.0, GilReleased(),
           "True once there is a failure, False when `seconds` passed before (< 0: no limit).")
      .def(
          "rethrow",
          [](const Watch& watch) {
            if (const auto error = watch.failure()) throw Error(*error);
          },
          "Raises the first failure, if any.")
      .def("failed_ranks", &Watch::failed_ranks, "Ranks known to be dead.")
      .def("left_ranks", &Watch::left_ranks, "Ranks that said goodbye.");

  m.def("guard_descriptor", &fork_guard::add, "fd"_a,
        "Replaces the descriptor by one of /dev/null in every forked child, from now on.");
  m.def("unguard_descriptor", &fork_guard::remove, "fd"_a,
        "Ends the guard; required before the descriptor is closed or given away.");
}
// -------------------------------------------------------------------------------------------------------

}  // namespace

void bind(nb::module_ m) {
  bind_watch(m);
  m.doc() = "The collective engine: shared memory inside a host, a TCP ring between hosts.";
  nb::enum_<DType>(m, "DType")
      .value("FLOAT32", DType::f32)
      .value("FLOAT64", DType::f64)
      .value("BFLOAT16", DType::bf16);
  nb::enum_<ReduceOp>(m, "ReduceOp").value("SUM", ReduceOp::sum).value("AVG", ReduceOp::avg);

  nb::class_<Operation>(m, "Operation", "A submitted call; completed once.")
      .def("wait", &Operation::wait, "seconds"_a = -1.0, GilReleased(),
           "True when it is over, False when `seconds` passed before (< 0: no limit).")
      .def("done", &Operation::done)
      .def("rethrow", &Operation::rethrow, "Raises the error of a finished operation, if any.");

  nb::class_<RingEnds>(m, "RingEnds", "Connected sockets to both neighbours; owned by the group.")
      .def("__init__",
           [](RingEnds* self, int next_socket, int next_rank, int previous_socket,
              int previous_rank, std::size_t index) {
             new (self) RingEnds{next_socket, next_rank, previous_socket, previous_rank, index};
           },
           "next_socket"_a, "next_rank"_a, "previous_socket"_a, "previous_rank"_a, "index"_a);

  nb::class_<Group>(m, "Group", "A process group of the engine.")
      .def("__init__", &make_group, nb::kw_only(), "rank"_a, "world"_a, "timeout_s"_a, "spin"_a,
           "control"_a, "members"_a, "me"_a, "hosts"_a, "lanes"_a, "ring"_a.none(),
           "members: (rank, Unix socket, pidfd) of this host in team order, -1 where there is none; control: "
           "descriptor of the control segment, -1 for a rank alone on its host.")
      .def(
          "allreduce",
          [](Group& group, std::uintptr_t data, std::size_t count, DType dtype, ReduceOp op,
             bool run_here) {
            return group.allreduce(reinterpret_cast<void*>(data), count, dtype, op, run_here);
          },
          "data"_a, "count"_a, "dtype"_a, "op"_a, "run_here"_a, GilReleased(),
          "Reduces `count` elements at address `data` in place; they must stay alive until it is done.")
      .def("abort", &Group::abort, GilReleased())
      .def("set_timeout", &Group::set_timeout, "seconds"_a)
      .def_prop_ro("network_bytes_sent", &Group::network_bytes_sent,
                   "Bytes this rank has sent to other hosts.");

  m.def("control_bytes", &Team::control_bytes, "members"_a);
  m.def(
      "create_segment",
      [](const std::string& name, std::size_t bytes) {
        const Segment segment = Segment::create(name, bytes);
        const int fd = ::dup(segment.fd());
        if (fd < 0) throw_errno("cannot duplicate the descriptor of a shared segment");
        return fd;
      },
      "name"_a, "bytes"_a, GilReleased(),
      "Descriptor of a new zeroed and reserved shared segment; the caller closes it.");
  m.def("arena_block", &arena_block, "bytes"_a,
        "Zero-copy memory as a uint8 array; given back when the array dies.");
  m.def("arena_reserved_bytes", [] { return Arena::of_process().reserved_bytes(); },
        "Shared memory that this process holds for zero-copy tensors.");
  m.def(
      "in_arena",
      [](std::uintptr_t data, std::size_t bytes) {
        return Arena::of_process().find(reinterpret_cast<void*>(data), bytes).has_value();
      },
      "data"_a, "bytes"_a, "Do these bytes lie in zero-copy memory?");
}

}  // namespace ff::hfreduce
