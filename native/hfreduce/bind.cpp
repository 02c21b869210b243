// Bindings of the collective engine. Every call that waits or moves tensor bytes releases the GIL.
#include <sys/socket.h>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/set.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <mutex>

#include "base/io/socket.hpp"
#include "base/process/fork_guard.hpp"
#include "base/process/thread_cpus.hpp"
#include "hfreduce/device/stager_cuda.hpp"
#include "hfreduce/device/stager_fake.hpp"
#include "hfreduce/engine/arena.hpp"
#include "hfreduce/engine/group.hpp"
#include "hfreduce/engine/watch.hpp"
#include "hfreduce/host/placement.hpp"
#include "hfreduce/p2p/p2p_engine.hpp"
#include "hfreduce/transport/ucx_api.hpp"
#include "signals.hpp"

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
  const nb::capsule owner(block, [](void* p) noexcept { Arena::of_process().release(static_cast<char*>(p)); });
  return Bytes(block, {bytes}, owner);
}

Bytes shared_block(const Operation& operation) {
  auto* hold = new std::shared_ptr<SharedResult>(operation.shared);
  const nb::capsule owner(hold, [](void* p) noexcept { delete static_cast<std::shared_ptr<SharedResult>*>(p); });
  return Bytes((*hold)->data(), {(*hold)->bytes()}, owner);
}

std::unique_ptr<Team> make_team(int control, const std::vector<std::array<int, 3>>& members, std::size_t me,
                                bool spin) {
  std::vector<Member> list;
  for (const auto& [rank, socket, process] : members) list.push_back({rank, socket, process});
  return std::make_unique<Team>(Segment::attach(control), std::move(list), me, spin);
}

template <class Awaited>
bool wait_for(Awaited& awaited, double seconds) {
  return signals::wait_with_handlers(seconds, [&](double limit) { return awaited.wait(limit); });
}

bool wait_for_message(P2PEngine& post, Operation& operation, double seconds) {
  return signals::wait_with_handlers(seconds, [&](double limit) { return post.wait(operation, limit); });
}

using Buffers = std::vector<std::pair<std::uintptr_t, std::size_t>>;

Pieces pieces_of(const Buffers& buffers) {
  Pieces pieces;
  pieces.reserve(buffers.size());
  for (const auto& [data, bytes] : buffers) pieces.push_back({reinterpret_cast<char*>(data), bytes});
  return pieces;
}

void make_group(Group* self, int rank, int world, double timeout_s, bool spin, int control,
                const std::vector<std::array<int, 3>>& members, std::size_t me,
                const std::vector<std::vector<int>>& hosts, std::size_t host, const std::vector<std::uint32_t>& zones,
                TransportKind transport) {
  auto team = members.size() > 1 ? make_team(control, members, me, spin) : nullptr;
  new (self) Group({rank, world, timeout_s, Layout{hosts, host, me, zones}, transport}, std::move(team));
}

Request make_request(Kind kind, std::uint64_t count, DType dtype, Op op, int root, Codec wire) {
  Request request;
  request.call.kind = kind;
  request.call.count = count;
  request.call.dtype = dtype;
  request.call.op = op;
  request.call.root = root;
  request.call.wire = wire;
  return request;
}

std::shared_ptr<Operation> submit(Group& group, Kind kind, const Buffers& in, const Buffers& out, std::uint64_t count,
                                  DType dtype, Op op, int root, Codec wire, std::uintptr_t residual, std::uint64_t seed,
                                  bool shared, int priority, std::uint64_t label, double timeout_s, bool run_here) {
  Request request = make_request(kind, count, dtype, op, root, wire);
  request.in = pieces_of(in);
  request.out = pieces_of(out);
  request.residual = reinterpret_cast<float*>(residual);
  request.seed = seed;
  request.call.shared = shared ? 1 : 0;
  request.call.label = label;
  request.priority = priority;
  request.timeout_s = timeout_s;
  return signals::run_with_handlers([&] { return group.submit(std::move(request), run_here); });
}

// Fast path of a synchronous allreduce on one host. Returns null when the allreduce is over; otherwise the operation
// waits for other operations, and the caller must wait for it.
std::shared_ptr<Operation> allreduce_now(Group& group, std::uintptr_t data, std::size_t bytes, std::uint64_t count,
                                         DType dtype, Op op) {
  auto operation = signals::run_with_handlers([&] {
    Request request = make_request(Kind::allreduce, count, dtype, op, -1, Codec::none);
    request.in.push_back({reinterpret_cast<char*>(data), bytes});
    request.out = request.in;
    return group.submit(std::move(request), true);
  });
  if (!operation->done()) return operation;
  operation->rethrow();
  return nullptr;
}

std::vector<int> peers(Group& group, Kind kind, std::uint64_t count, DType dtype, int root, Codec wire, int priority) {
  Request request = make_request(kind, count, dtype, Op::sum, root, wire);
  request.priority = priority;
  return group.peers(request);
}

using Fields = nb::typed<nb::dict, nb::str, nb::object>;

nb::typed<nb::list, Fields> records(const Group& group) {
  static constexpr const char* kStates[] = {"?", "queued", "running", "done", "failed", "cancelled"};
  nb::typed<nb::list, Fields> all;
  for (const Record& record : group.records()) {
    nb::dict one;
    one["number"] = record.number;
    one["call"] = to_string(record.call);
    one["state"] = kStates[static_cast<std::uint32_t>(record.state)];
    one["submitted_ns"] = record.submitted_ns;
    one["started_ns"] = record.started_ns;
    one["ended_ns"] = record.ended_ns;
    all.append(one);
  }
  return all;
}

// ---- Watch and the fork guard -------------------------------------------------------------------------
// The group asks the watch which error to report, and the watch notifies the group. Either may be destroyed first
// without affecting the other.
struct BoundWatch : Watch {
  struct Handle {
    std::mutex mutex;
    Watch* watch;
  };

  using Watch::Watch;
  ~BoundWatch() {
    const std::lock_guard lock(handle->mutex);
    handle->watch = nullptr;
  }
  std::shared_ptr<Handle> handle = std::make_shared<Handle>();
};

void bind_watch(nb::module_ m) {
  nb::class_<BoundWatch>(m, "Watch", "Failure detector of a group: detects the death of a rank and notifies all ranks.")
      .def(nb::init<int, int>(), nb::kw_only(), "rank"_a, "world"_a)
      .def("add_process", &BoundWatch::add_process, "rank"_a, "pidfd"_a, GilReleased(),
           "Watches a process of this host; owns the descriptor.")
      .def("add_link", &BoundWatch::add_link, "rank"_a, "socket"_a, GilReleased(),
           "Adds a duplex control link; owns the socket.")
      .def(
          "attach",
          [](BoundWatch& watch, Group& group, P2PEngine& post) {
            watch.handle->watch = &watch;
            group.set_announcer([handle = watch.handle](const Error& error) {
              const std::lock_guard lock(handle->mutex);
              return handle->watch != nullptr ? handle->watch->announce(error) : error;
            });
            post.set_judge([handle = watch.handle](const Error& error) {
              const std::lock_guard lock(handle->mutex);
              return handle->watch != nullptr ? handle->watch->verdict(error) : error;
            });
            watch.listen({[&group] { group.hurry(); },
                          [&group, &post](const Error& error) {
                            group.fail(error);
                            post.fail(error);
                          },
                          [&group](std::uint64_t number) { group.withdraw(number); }});
          },
          "group"_a, "post"_a, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), GilReleased(),
          "Fails the group and `post` with the first failure, and announces failures that the group detects.")
      .def(
          "announce",
          [](BoundWatch& watch, const std::string& message, int rank) {
            const auto code = rank >= 0 ? Code::rank_failed : Code::collective;
            watch.announce(Error(code, message, rank));
          },
          "message"_a, "rank"_a = -1, GilReleased(),
          "Breaks the group on all ranks because of `rank`; -1: the reason does not lie with a single rank.")
      .def("withdraw", &BoundWatch::withdraw, "operation"_a, GilReleased(),
           "Asks all ranks to cancel the operation of this number.")
      .def("leave", &BoundWatch::leave, "seconds"_a = 1.0, GilReleased(),
           "Announces that this rank leaves; waits at most `seconds` until the neighbours have received that.")
      .def("drop_links", &BoundWatch::drop_links, GilReleased(), "Closes all links unannounced, as a death does.")
      .def("wait", &wait_for<BoundWatch>, "seconds"_a = -1.0,
           "Waits for a failure; returns False if `seconds` pass first (< 0: no limit).")
      .def(
          "rethrow",
          [](const BoundWatch& watch) {
            if (const auto error = watch.failure()) throw Error(*error);
          },
          "Raises the first failure, if any.")
      .def("failed_ranks", &BoundWatch::failed_ranks, "Ranks known to be dead.")
      .def("left_ranks", &BoundWatch::left_ranks, "Ranks that left in an orderly way.");

  m.def("set_thread_cpus", &thread_cpus::set, "cpus"_a,
        "Sets the cores of the threads that groups start from now on; an empty list: all cores of the process.");
  m.def("guard_descriptor", &fork_guard::add, "fd"_a,
        "Replaces the descriptor by one of /dev/null in every forked child, from now on.");
  m.def("unguard_descriptor", &fork_guard::remove, "fd"_a,
        "Ends the guard. Must be called before the descriptor is closed or given away.");
}
// -------------------------------------------------------------------------------------------------------

// ---- Rules: the choice of the algorithm between hosts ---------------------------------------------------
void bind_rules(nb::module_ m) {
  nb::enum_<Algorithm>(m, "Algorithm")
      .value("RING", Algorithm::ring)
      .value("TREE", Algorithm::tree)
      .value("DIRECT", Algorithm::direct)
      .value("CHAIN", Algorithm::chain);
  nb::class_<Rule>(m, "Rule", "Algorithm for calls of `kind` on at least `hosts` hosts and of at most `bytes` bytes.")
      .def(
          "__init__",
          [](Rule* self, Kind kind, std::size_t hosts, std::size_t bytes, Algorithm algorithm, std::size_t lanes) {
            new (self) Rule{kind, hosts, bytes, algorithm, lanes};
          },
          nb::kw_only(), "kind"_a, "hosts"_a, "bytes"_a, "algorithm"_a, "lanes"_a,
          "bytes: ANY_BYTES is no limit; lanes: the most lanes to use, 0 for all.")
      .def_ro("kind", &Rule::kind)
      .def_ro("hosts", &Rule::hosts)
      .def_ro("bytes", &Rule::bytes)
      .def_ro("algorithm", &Rule::algorithm)
      .def_ro("lanes", &Rule::lanes)
      .def(
          "__eq__", [](const Rule& rule, const Rule& other) { return rule == other; }, nb::is_operator(),
          nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__repr__", [](const Rule& rule) {
        return nb::str("Rule({}, hosts={}, bytes={}, {}, lanes={})")
            .format(rule.kind, rule.hosts, rule.bytes, rule.algorithm, rule.lanes);
      });
  m.attr("ANY_BYTES") = kAnyBytes;
  m.def("default_rules", &default_rules, "Rules that are used where no other rule applies.");
  m.def(
      "choose_rule",
      [](const std::vector<Rule>& rules, Kind kind, std::size_t hosts, std::size_t bytes) {
        if (kind != Kind::allreduce && kind != Kind::broadcast && kind != Kind::reduce) {
          throw Error(Code::invalid, "invalid kind: it has no rules, expected allreduce, broadcast or reduce");
        }
        if (hosts < 2) throw Error(Code::invalid, "rules need at least two hosts");
        return choose_rule(rules, kind, hosts, bytes);
      },
      "rules"_a, "kind"_a, "hosts"_a, "bytes"_a,
      "Returns the first of the rules that applies; if none does, the first of the default rules.");
}
// ---------------------------------------------------------------------------------------------------------

// ---- Segments and their memory nodes --------------------------------------------------------------------
void bind_segments(nb::module_ m) {
  nb::enum_<numa::Mode>(m, "NumaMode").value("INTERLEAVE", numa::Mode::interleave).value("BIND", numa::Mode::bind);
  nb::class_<Placed>(m, "Placed", "A range of a segment and the memory nodes for it.")
      .def(
          "__init__",
          [](Placed* self, std::size_t offset, std::size_t bytes, numa::Mode mode, std::vector<int> nodes) {
            new (self) Placed{offset, bytes, {mode, std::move(nodes)}};
          },
          nb::kw_only(), "offset"_a, "bytes"_a, "mode"_a, "nodes"_a)
      .def_ro("offset", &Placed::offset)
      .def_ro("bytes", &Placed::bytes)
      .def_prop_ro("mode", [](const Placed& part) { return part.policy.mode; })
      .def_prop_ro("nodes", [](const Placed& part) { return part.policy.nodes; });
  m.def(
      "control_placement",
      [](std::size_t members, const std::string& interface) {
        return plan_placement(control_layout(members), numa::nodes(), numa::node_of_interface(interface));
      },
      "members"_a, "interface"_a, GilReleased(),
      "Returns the memory nodes for the parts of a control segment, for a network interface; empty on one node.");
  m.def(
      "create_segment",
      [](const std::string& name, std::size_t bytes, const std::vector<Placed>& placement) {
        for (const Placed& part : placement) {
          if (part.offset > bytes || part.bytes > bytes - part.offset) {
            throw Error(Code::invalid, "a placed range lies outside the segment");
          }
        }
        Segment::Place place;
        if (!placement.empty()) place = [&](char* data) { apply_placement(placement, data); };
        const Segment segment = Segment::create(name, bytes, place);
        const int fd = ::dup(segment.fd());
        if (fd < 0) throw_errno("cannot duplicate the descriptor of a shared segment");
        return fd;
      },
      "name"_a, "bytes"_a, "placement"_a = std::vector<Placed>(), GilReleased(),
      "Creates a zeroed and reserved shared segment. Returns its descriptor, which the caller closes.");
}
// ---------------------------------------------------------------------------------------------------------

// ---- Devices ------------------------------------------------------------------------------------------
using Operations = std::vector<std::shared_ptr<Operation>>;

std::pair<Operations, std::shared_ptr<Passage>> submit_staged(Stager& stager, Group& group, Device::Stream stream,
                                                              const std::vector<std::uint64_t>& counts, Kind kind,
                                                              const Buffers& in, const Buffers& out,
                                                              std::uint64_t count, DType dtype, Op op, int root,
                                                              Codec wire, std::uintptr_t residual, std::uint64_t seed,
                                                              int priority, std::uint64_t label, double timeout_s) {
  Request request = make_request(kind, count, dtype, op, root, wire);
  request.in = pieces_of(in);
  request.out = pieces_of(out);
  request.residual = reinterpret_cast<float*>(residual);
  request.seed = seed;
  request.priority = priority;
  request.call.label = label;
  request.timeout_s = timeout_s;
  const nb::gil_scoped_release release;
  auto staged = stager.stage(request, counts, stream);
  Operations operations;
  for (Request& part : staged.operations) operations.push_back(group.submit(std::move(part), false));
  return {std::move(operations), std::move(staged.passage)};
}

char* address(std::uintptr_t data) { return reinterpret_cast<char*>(data); }

// Devices are never destroyed, because streams may still be working when Python ends.
void bind_devices(nb::module_ m) {
  nb::class_<Device>(m, "Device", "A device's runtime; lives as long as the process.");
  nb::class_<FakeDevice, Device>(m, "FakeDevice", "A device for tests: plain memory, and streams with delays.")
      .def("make_stream", &FakeDevice::make_stream, GilReleased())
      .def(
          "copy",
          [](FakeDevice& device, Device::Stream stream, std::uintptr_t to, std::uintptr_t from, std::size_t bytes) {
            device.copy(stream, address(to), address(from), bytes);
          },
          "stream"_a, "to"_a, "source"_a, "bytes"_a, GilReleased(), "Queues a copy, as the user's computation.")
      .def("stop", &FakeDevice::stop, "stream"_a, GilReleased(), "Stops a stream before its next command.")
      .def("go_on", &FakeDevice::go_on, "stream"_a, GilReleased())
      .def("synchronize", &FakeDevice::synchronize, "stream"_a, GilReleased())
      .def("history", &FakeDevice::history, GilReleased(), "Commands that have run, in order: 'stream command'.")
      .def_prop_ro("pinned_bytes", &FakeDevice::pinned_bytes)
      .def_prop_ro("live_events", &FakeDevice::live_events);
  m.def(
      "fake_device", [](std::int64_t delay_us) { return new FakeDevice(std::chrono::microseconds(delay_us)); },
      "delay_us"_a = 0, nb::rv_policy::reference, "Makes a fake device that waits `delay_us` before each command.");
  m.def(
      "cuda_device", [](int index) -> Device* { return new CudaDevice(index); }, "index"_a, nb::rv_policy::reference,
      GilReleased(), "Opens a CUDA device with the CUDA runtime of this process.");

  nb::class_<Passage>(m, "Passage", "A call on device memory, until the device has finished with it.")
      .def("follow", &Passage::follow, "stream"_a, GilReleased(),
           "Makes the stream wait until the results are in the device's memory.")
      .def("extend", &Passage::extend, "stream"_a, GilReleased(),
           "Makes streams that follow from now on also wait for the current work in this stream.")
      .def_prop_ro("finished", &Passage::finished, "True when the device's memory is no longer accessed.")
      .def("wait", &wait_for<Passage>, "seconds"_a = -1.0,
           "Waits until the passage is finished; returns False if `seconds` pass first (< 0: no limit).");

  nb::class_<Stager>(m, "Stager", "Stages the calls of one group on one device.")
      .def(nb::init<Device&>(), "device"_a, GilReleased())
      .def("submit", &submit_staged, nb::kw_only(), "group"_a, "stream"_a, "counts"_a, "kind"_a, "inputs"_a,
           "outputs"_a, "count"_a, "dtype"_a, "op"_a = Op::sum, "root"_a = -1, "wire"_a = Codec::none, "residual"_a = 0,
           "seed"_a = 0, "priority"_a = 0, "label"_a = 0, "timeout_s"_a = 0.0,
           "Submits a call on device memory (see Group.submit) after the current work in `stream`. `counts`: the "
           "elements of each operation into which the call is cut. Memory must stay alive until the passage is "
           "finished.");
}
// -------------------------------------------------------------------------------------------------------

}  // namespace

void bind(nb::module_ m) {
  bind_watch(m);
  m.doc() = "The collective engine: shared memory inside a host, TCP or UCX between hosts.";
  nb::enum_<DType>(m, "DType")
      .value("FLOAT32", DType::f32)
      .value("FLOAT64", DType::f64)
      .value("FLOAT16", DType::f16)
      .value("BFLOAT16", DType::bf16)
      .value("FLOAT8_E4M3FN", DType::f8e4m3)
      .value("FLOAT8_E5M2", DType::f8e5m2)
      .value("INT64", DType::i64)
      .value("INT32", DType::i32)
      .value("INT16", DType::i16)
      .value("INT8", DType::i8)
      .value("UINT8", DType::u8)
      .value("BOOL", DType::boolean);
  nb::enum_<Op>(m, "ReduceOp")
      .value("SUM", Op::sum)
      .value("AVG", Op::avg)
      .value("MIN", Op::min)
      .value("MAX", Op::max)
      .value("PRODUCT", Op::product)
      .value("BAND", Op::band)
      .value("BOR", Op::bor)
      .value("BXOR", Op::bxor);
  nb::enum_<Codec>(m, "Codec")
      .value("NONE", Codec::none)
      .value("FP32", Codec::fp32)
      .value("BF16", Codec::bf16)
      .value("FP16", Codec::fp16)
      .value("INT8", Codec::int8);
  nb::enum_<Kind>(m, "Kind")
      .value("ALLREDUCE", Kind::allreduce)
      .value("REDUCE_SCATTER", Kind::reduce_scatter)
      .value("ALL_GATHER", Kind::all_gather)
      .value("BROADCAST", Kind::broadcast)
      .value("REDUCE", Kind::reduce)
      .value("GATHER", Kind::gather)
      .value("SCATTER", Kind::scatter)
      .value("ALL_TO_ALL", Kind::all_to_all)
      .value("BARRIER", Kind::barrier);

  nb::enum_<TransportKind>(m, "Transport", "Transport of the bytes of collectives between hosts.")
      .value("TCP", TransportKind::tcp)
      .value("UCX", TransportKind::ucx);

  nb::class_<Operation>(m, "Operation", "A submitted call; completed once.")
      .def("wait", &wait_for<Operation>, "seconds"_a = -1.0,
           "Waits until the operation is over; returns False if `seconds` pass first (< 0: no limit).")
      .def("done", &Operation::done)
      .def_ro("number", &Operation::number, "Number in the order of submission to the group; equal on all ranks.")
      .def_prop_ro("priority", [](const Operation& operation) { return operation.request.priority; })
      .def_ro("source", &Operation::source, "The sender's rank, once a receive from any source is over.")
      .def("shared", &shared_block,
           "The block of a shared result as a uint8 array. REQUIRES: the operation is over, without error.")
      .def("rethrow", &Operation::rethrow, "Raises the error of a finished operation, if any.");

  nb::class_<Group>(m, "Group", "A process group of the engine.")
      .def("__init__", &make_group, nb::kw_only(), "rank"_a, "world"_a, "timeout_s"_a, "spin"_a, "control"_a,
           "members"_a, "me"_a, "hosts"_a, "host"_a, "zones"_a, "transport"_a = TransportKind::tcp,
           "members: (rank, Unix socket, pidfd) of this host in team order, -1 where there is none; control: "
           "descriptor of the control segment, -1 for a rank alone on its host.")
      .def("submit", &submit, nb::kw_only(), "kind"_a, "inputs"_a, "outputs"_a, "count"_a, "dtype"_a, "op"_a = Op::sum,
           "root"_a = -1, "wire"_a = Codec::none, "residual"_a = 0, "seed"_a = 0, "shared"_a = false, "priority"_a = 0,
           "label"_a = 0, "timeout_s"_a = 0.0, "run_here"_a = false,
           "Starts a collective. inputs, outputs: (address, bytes) by rank; this memory must stay alive until the "
           "operation is done. timeout_s: timeout of this call; 0: the group's. run_here: if nothing is queued, this "
           "thread runs the operation before the call returns.")
      .def("allreduce_now", &allreduce_now, "data"_a, "bytes"_a, "count"_a, "dtype"_a, "op"_a,
           "Runs a synchronous allreduce in place. Returns None when it is over; returns the operation if other "
           "operations must run before it.")
      .def("peers", &peers, nb::kw_only(), "kind"_a, "count"_a, "dtype"_a, "root"_a = -1, "wire"_a = Codec::none,
           "priority"_a = 0, GilReleased(), "Ranks of other hosts that such a call sends to.")
      .def("add_outgoing", &Group::add_outgoing, "rank"_a, "fd"_a, GilReleased(),
           "Adds a connected socket to send payload to `rank`, and owns it.")
      .def("add_incoming", &Group::add_incoming, "rank"_a, "fd"_a, GilReleased(),
           "Adds a connected socket to receive payload from `rank`, and owns it.")
      .def("abort", &Group::abort, GilReleased())
      .def(
          "rethrow",
          [](Group& group) {
            if (const auto error = group.failure()) throw Error(*error);
          },
          "Raises the error that broke the group, if any.")
      .def("records", &records, "The last operations, oldest first, with times of the monotonic clock.")
      .def("set_rules", &Group::set_rules, "rules"_a, GilReleased(),
           "Sets the rules that choose the algorithms between hosts. REQUIRES: equal rules on all ranks, and no "
           "operation in flight.")
      .def("withdrawals", &Group::withdrawals, GilReleased(),
           "Numbers of operations that will end as cancelled when their turn comes; on rank 0 only.")
      .def("set_timeout", &Group::set_timeout, "seconds"_a)
      .def_prop_ro("network_bytes_sent", &Group::network_bytes_sent, "Bytes this rank has sent to other hosts.");

  nb::class_<P2PEngine>(m, "P2PEngine", "Point-to-point messages between the ranks of a group.")
      .def(nb::init<int, int>(), nb::kw_only(), "rank"_a, "world"_a)
      .def(
          "add_outgoing",
          [](P2PEngine& post, int rank, int fd) {
            int family = AF_INET;
            socklen_t size = sizeof family;
            ::getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &family, &size);
            post.add_outgoing(rank, fd, family == AF_UNIX);  // Unix sockets connect ranks of one host
          },
          "rank"_a, "fd"_a, GilReleased(), "Adds a connected socket to send messages to `rank`, and owns it.")
      .def("heard_from", &P2PEngine::heard_from, "rank"_a, GilReleased(),
           "True if `rank`, another rank of the group, has ever had a link to this rank.")
      .def("add_incoming", &P2PEngine::add_incoming, "rank"_a, "fd"_a, GilReleased(),
           "Adds a connected socket to receive from `rank`, and owns it.")
      .def(
          "send",
          [](P2PEngine& post, int to, std::uint64_t tag, std::uintptr_t data, std::size_t bytes, double seconds,
             bool attended) {
            return post.send(to, tag, reinterpret_cast<const void*>(data), bytes, seconds, attended);
          },
          "to"_a, "tag"_a, "data"_a, "bytes"_a, "seconds"_a, "attended"_a, GilReleased(),
          "Sends `bytes` bytes at address `data`, which must stay alive until the operation is over. seconds <= 0: no "
          "deadline. attended: the caller calls wait() next.")
      .def(
          "receive",
          [](P2PEngine& post, int from, std::uint64_t tag, std::uintptr_t data, std::size_t bytes, double seconds,
             bool attended) {
            return post.receive(from, tag, reinterpret_cast<void*>(data), bytes, seconds, attended);
          },
          "source"_a, "tag"_a, "data"_a, "bytes"_a, "seconds"_a, "attended"_a, GilReleased(),
          "Receives from rank `source`, or from any rank (-1); see send().")
      .def("wait", &wait_for_message, "operation"_a, "seconds"_a,
           "Waits like Operation.wait, but this thread moves the bytes meanwhile.")
      .def(
          "fail",
          [](P2PEngine& post, const std::string& message, int rank) {
            post.fail(Error(rank >= 0 ? Code::rank_failed : Code::collective, message, rank));
          },
          "message"_a, "rank"_a = -1, GilReleased(), "Ends all present and later messages with this error.");

  m.def(
      "load_ucx", [] { ucx::api(); }, GilReleased(),
      "Raises CollectiveError, which names the package to install, if a group over UCX cannot be made.");
  m.def("control_bytes", &Team::control_bytes, "members"_a);
  bind_rules(m);
  bind_segments(m);
  bind_devices(m);
  m.def("arena_block", &arena_block, "bytes"_a, "Allocates zero-copy memory as a uint8 array; freed with the array.");
  m.def(
      "arena_reserved_bytes", [] { return Arena::of_process().reserved_bytes(); },
      "Shared memory that this process holds for zero-copy tensors.");
  m.def(
      "in_arena",
      [](std::uintptr_t data, std::size_t bytes) {
        return Arena::of_process().find(reinterpret_cast<void*>(data), bytes).has_value();
      },
      "data"_a, "bytes"_a, "True if these bytes lie in zero-copy memory.");
}

}  // namespace ff::hfreduce
