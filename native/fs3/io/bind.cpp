// Python binding of the storage service: `fireflyer._native.fs3.io`. It takes ownership of descriptors given to it.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "base/error.hpp"
#include "fs3/io/service/service.hpp"
#include "fs3/store/disk/directory_disk.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ff::fs3::io {

void bind(nb::module_ m);

namespace {

using Free = nb::call_guard<nb::gil_scoped_release>;
using Members = std::vector<std::tuple<TargetId, int, replica::Incarnation>>;
using Report = std::tuple<TargetId, replica::Incarnation, int, ChainVersion, std::uint64_t, ChainVersion, int, bool>;

constexpr std::size_t kNumber = 1;  // index of the state word with the store's number; word 0 belongs to Target

// Returns the store's random number, which a new store gets here. Another number shows the manager that a disk was
// replaced.
std::uint64_t number_of(store::Store& held) {
  auto words = held.state();
  if (words[kNumber] == 0) {
    std::random_device random;
    words[kNumber] = (std::uint64_t{random()} << 31 | random() >> 1) + 1;
    held.keep_state(words);
    held.sync();
    if (held.failed()) throw Error(Code::storage, "cannot write to the new chunk store");
  }
  return words[kNumber];
}

// A service, and its targets by number. Thread contract: any thread.
class Node {
 public:
  Node(unsigned workers, std::size_t buffers) : service_({workers, buffers}) {}
  ~Node() { stop(); }

  void open(const std::string& path, TargetId id, std::uint32_t chain, replica::Incarnation incarnation,
            std::uint64_t reserve_bytes) {
    auto disk = std::make_shared<store::DirectoryDisk>(path);
    auto held = store::Store::open(*disk, {id, chain}, {.reserve_bytes = reserve_bytes});
    const std::uint64_t number = number_of(held);
    auto target = std::make_shared<Target>(std::move(disk), std::move(held), id, chain, incarnation, service_.sender());
    target->on_change([this] { changed(); });
    std::lock_guard lock(mutex_);
    if (targets_.contains(id)) throw Error(Code::invalid, "target " + std::to_string(id) + " is already open");
    service_.add(target);
    targets_.emplace(id, Held{std::move(target), incarnation, number});
  }

  void close(TargetId id) {
    Held held;
    {
      std::lock_guard lock(mutex_);
      const auto found = targets_.find(id);
      if (found == targets_.end()) return;
      held = std::move(found->second);
      targets_.erase(found);
    }
    service_.remove(id);
  }

  void routing(TargetId id, ChainVersion version, const Members& members) {
    replica::Routing routing{version, {}};
    for (const auto& [target, state, incarnation] : members) {
      routing.members.push_back({target, static_cast<replica::State>(state), incarnation});
    }
    if (const auto target = find(id)) target->routing(routing);
  }

  // Grants a lease that ends `left` seconds from now to these targets, each with its chain's version at the manager.
  void lease(double left, const std::vector<std::tuple<TargetId, ChainVersion>>& targets) {
    const auto until =
        Target::Clock::now() + std::chrono::duration_cast<Target::Clock::duration>(std::chrono::duration<double>(left));
    for (const auto& [id, version] : targets) {
      if (const auto target = find(id)) target->lease(until, version);
    }
  }

  std::vector<Report> reports() {
    std::vector<Report> reports;
    std::lock_guard lock(mutex_);
    for (const auto& [id, held] : targets_) {
      const auto now = held.target->report();
      reports.emplace_back(id, held.incarnation, static_cast<int>(now.local.state), now.local.version, held.number,
                           now.chain_version, static_cast<int>(now.role), now.failed);
    }
    return reports;
  }

  // Waits at most `seconds` until a target has news to report; returns whether one has.
  bool wait(double seconds) {
    std::unique_lock lock(news_mutex_);
    const bool told = woken_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return news_; });
    news_ = false;
    return told;
  }

  // Compares the bytes of up to `limit` chunks after (inode, index) with their CRCs and has damage repaired. Returns
  // the last position, or (0, 0) at the end.
  std::tuple<std::uint64_t, std::uint32_t> scrub(TargetId id, std::uint64_t inode, std::uint32_t index,
                                                 std::size_t limit) {
    const auto target = find(id);
    if (!target) return {};
    const bool first = inode == 0 && index == 0;
    const auto page = target->store().page(first ? std::nullopt : std::optional(ChunkId{inode, index}), limit);
    for (const auto& entry : page) target->suspect(entry.chunk);
    if (page.empty()) {
      target->store().snapshot();  // afterwards earlier damage to the log and index on the disk does not matter
      return {};
    }
    return {page.back().chunk.inode, page.back().chunk.index};
  }

  std::tuple<std::vector<std::tuple<TargetId, std::uint64_t, std::uint32_t, bool>>, std::uint64_t> findings() {
    std::vector<std::tuple<TargetId, std::uint64_t, std::uint32_t, bool>> found;
    std::uint64_t more = 0;
    for (const auto& target : all()) {
      const auto its = target->findings();
      for (const auto& one : its.first) found.emplace_back(target->id(), one.chunk.inode, one.chunk.index, one.damaged);
      more += its.more;
    }
    return {std::move(found), more};
  }

  nb::dict statistics() {
    const auto now = service_.statistics();
    nb::dict found;
    found["connections"] = now.connections;
    found["reads"] = now.reads;
    found["writes"] = now.writes;
    found["messages"] = now.messages;
    found["read_bytes"] = now.read_bytes;
    found["written_bytes"] = now.written_bytes;
    found["refused"] = now.refused;
    found["buffer_bytes"] = now.buffer_bytes;
    found["local_bytes"] = now.local_bytes;
    found["held"] = now.held;
    found["ready"] = now.ready;
    found["buffer_limit"] = now.buffer_limit;
    found["jobs"] = now.jobs;
    found["mismatched"] = now.mismatched;
    found["reported"] = now.reported;
    store::Statistics sum;
    for (const auto& target : all()) {
      const auto one = target->store().statistics();
      sum.chunks += one.chunks;
      sum.bytes += one.bytes;
      sum.extent_bytes += one.extent_bytes;
      sum.index_bytes += one.index_bytes;
      sum.log_bytes += one.log_bytes;
    }
    found["chunks"] = sum.chunks;
    found["bytes"] = sum.bytes;
    found["extent_bytes"] = sum.extent_bytes;
    found["index_bytes"] = sum.index_bytes;
    found["log_bytes"] = sum.log_bytes;
    return found;
  }

  // Returns the contents and counters of each target's store.
  nb::dict targets() {
    nb::dict found;
    for (const auto& target : all()) {
      store::Statistics held;
      Target::Counts counts;
      Target::Report report;
      {
        nb::gil_scoped_release free;
        held = target->store().statistics();
        counts = target->counts();
        report = target->report();
      }
      nb::dict one;
      one["chunks"] = held.chunks;
      one["bytes"] = held.bytes;
      one["extent_bytes"] = held.extent_bytes;
      one["log_bytes"] = held.log_bytes;
      one["mended"] = held.mended;
      one["groups"] = counts.groups;
      one["applied"] = counts.applied;
      one["checked"] = counts.checked;
      one["damaged"] = counts.damaged;
      one["unrepaired"] = counts.unrepaired;
      one["busy_chunks"] = report.busy_chunks;
      found[nb::int_(target->id())] = one;
    }
    return found;
  }

  // Returns for each kind of work the counts of durations in each bucket (see Meter), and their sum in ns.
  nb::dict timings() {
    ServiceStatistics now;
    Meter::Reading syncing;
    const auto targets = all();
    {
      nb::gil_scoped_release free;
      now = service_.statistics();
      for (const auto& target : targets) syncing += target->counts().syncing;
    }
    nb::dict found;
    const auto put = [&found](const char* what, const Meter::Reading& reading) {
      nb::list counts;
      for (const auto count : reading.counts) counts.append(count);
      found[what] = nb::make_tuple(counts, reading.total_ns);
    };
    put("read", now.reading);
    put("write", now.writing);
    put("sync", syncing);
    return found;
  }

  void serve(int fd) { service_.serve(fd); }
  void locate(TargetId target, std::uint32_t node) { service_.locate(target, node); }
  void connected(std::uint32_t node, int fd) { service_.connected(node, fd); }
  std::vector<std::uint32_t> wanted() const { return service_.wanted(); }

  void stop() {
    service_.stop();
    std::map<TargetId, Held> targets;
    std::lock_guard lock(mutex_);
    targets.swap(targets_);
  }

 private:
  struct Held {
    std::shared_ptr<Target> target;
    replica::Incarnation incarnation = 0;
    std::uint64_t number = 0;
  };

  std::shared_ptr<Target> find(TargetId id) {
    std::lock_guard lock(mutex_);
    const auto found = targets_.find(id);
    return found == targets_.end() ? nullptr : found->second.target;
  }
  std::vector<std::shared_ptr<Target>> all() {
    std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<Target>> targets;
    for (const auto& [id, held] : targets_) targets.push_back(held.target);
    return targets;
  }
  void changed() {
    std::lock_guard lock(news_mutex_);
    news_ = true;
    woken_.notify_all();
  }

  std::mutex news_mutex_;
  std::condition_variable woken_;
  bool news_ = false;
  Service service_;
  std::mutex mutex_;  // guards the members below
  std::map<TargetId, Held> targets_;
};

}  // namespace

void bind(nb::module_ m) {
  nb::class_<Node>(m, "Node", "The storage service of one process. Any thread.")
      .def(nb::init<unsigned, std::size_t>(), "workers"_a = 0, "buffers"_a = std::size_t{256} << 20,
           "workers: number of threads, 0 for cores + 4. buffers: most bytes of payload in flight.")
      .def("open", &Node::open, "path"_a, "target"_a, "chain"_a, "incarnation"_a,
           "reserve_bytes"_a = store::Options{}.reserve_bytes, Free(),
           "Opens or makes a target's chunk store in a directory and takes its place in the chain. Writes leave "
           "`reserve_bytes` of the disk free. Raises StorageError, NoSpace, ValueError.")
      .def("close", &Node::close, "target"_a, Free())
      .def("routing", &Node::routing, "target"_a, "version"_a, "members"_a, Free(),
           "Sets the target's chain as published: members (target, state, incarnation) in order. Ignores an older "
           "version.")
      .def("lease", &Node::lease, "left"_a, "targets"_a, Free(),
           "Grants a lease of `left` seconds from now to these (target, version of its chain at the manager).")
      .def("reports", &Node::reports, Free(),
           "(target, incarnation, local state, version of that state, number of the target's store, known chain "
           "version, role, failed) of each target.")
      .def("wait", &Node::wait, "seconds"_a, Free(),
           "Waits at most `seconds` until a report changes; returns True if one did.")
      .def("scrub", &Node::scrub, "target"_a, "inode"_a, "index"_a, "limit"_a, Free(),
           "Reads and checks up to `limit` chunks after chunk (inode, index). Returns the last chunk, or (0, 0) if "
           "there is none; then the index is also written anew.")
      .def("findings", &Node::findings, Free(),
           "Returns the findings since the last call: (target, inode, index, damaged) of chunks (False: the chunk is "
           "whole again or gone), and the number of findings beyond the first 64 of a target.")
      .def("serve", &Node::serve, "fd"_a, Free(), "Serves an authenticated connection of a client or another node.")
      .def("locate", &Node::locate, "target"_a, "node"_a, Free(), "Records the node of a target.")
      .def("connected", &Node::connected, "node"_a, "fd"_a, Free(),
           "Takes an authenticated connection to a node's service.")
      .def("wanted", &Node::wanted, Free(), "Nodes to which a connection is missing.")
      .def("statistics", &Node::statistics, nb::sig("def statistics(self) -> dict[str, int]"),
           "Counters since the start, and the contents of the chunk stores.")
      .def("targets", &Node::targets, nb::sig("def targets(self) -> dict[int, dict[str, int]]"),
           "By target: the contents of its store, and counters since the store was opened.")
      .def("timings", &Node::timings, nb::sig("def timings(self) -> dict[str, tuple[list[int], int]]"),
           "By kind of work (`read` and `write` frames, `sync`s): counts of durations, and their total in ns. Count n: "
           "durations from 2^(12 + n) to below 2^(13 + n) ns. The first count also has all shorter durations, the last "
           "count all longer ones.")
      .def("stop", &Node::stop, Free(), "Ends all threads and closes all targets. No other call may follow.");
}

}  // namespace ff::fs3::io
