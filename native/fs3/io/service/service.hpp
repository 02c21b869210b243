// A node's storage service: its targets, the connections of clients and other nodes, and the threads that serve them.
//
//   epoll, one shot -> worker: frames of one connection, in order -> targets -> answers on the same connection
//
// Thread contract: all calls from any thread; `stop` is called once, before or by the destructor. No thread takes a
// second lock while it holds one. The only exception is the lock of a Connection's `line`, under the Connection's lock.
// Invariants
//   - One worker at a time serves a connection (`owned`). Other threads queue their bytes in `line`, and send them only
//     if no worker owns the connection.
//   - A payload takes memory from the pool of its hop: 0 for clients, n for an update that is n hops from the client. A
//     hop waits only for memory of later hops, so nodes that are each other's successors cannot deadlock.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "fs3/io/service/held_reads.hpp"
#include "fs3/io/service/meter.hpp"
#include "fs3/io/service/shared_files.hpp"
#include "fs3/io/target/target.hpp"
#include "fs3/io/wire/frame_connection.hpp"

namespace ff::fs3::io {

class Peers;

struct ServiceOptions {
  unsigned workers = 0;                          // 0: cores + 4, at most 32
  std::size_t buffers = std::size_t{256} << 20;  // maximum bytes of payload in flight
};

struct ServiceStatistics {
  std::uint64_t connections = 0, reads = 0, writes = 0, messages = 0, read_bytes = 0, written_bytes = 0, refused = 0;
  std::uint64_t buffer_bytes = 0, buffer_limit = 0;
  std::uint64_t local_bytes = 0;    // part of read_bytes: clients read these bytes themselves
  std::uint64_t held = 0;           // local answers whose extents are kept from reuse
  std::uint64_t ready = 0;          // answers in memory for which `go` has not come yet
  std::uint64_t jobs = 0;           // jobs that wait for a worker
  std::uint64_t mismatched = 0;     // frames whose bytes did not match their CRCs on arrival
  std::uint64_t reported = 0;       // chunks that readers reported as damaged
  Meter::Reading reading, writing;  // durations of READ and WRITE frames, from arrival to answer
};

class Service {
 public:
  static constexpr std::size_t kHops = 4;

  explicit Service(ServiceOptions options = {});
  ~Service();
  void stop();

  void add(std::shared_ptr<Target> target);         // also starts the target
  std::shared_ptr<Target> remove(TargetId target);  // stops and returns the target; null if there is none
  std::shared_ptr<MessageSender> sender();          // for the service's targets

  void serve(int fd);  // takes an accepted and authenticated connection
  // Records the node of a target. Messages to the target take the connection that `connected` gave.
  void locate(TargetId target, std::uint32_t node);
  void connected(std::uint32_t node, int fd);
  std::vector<std::uint32_t> wanted() const;  // nodes whose connection is missing

  ServiceStatistics statistics() const;

 private:
  friend class Peers;
  struct Connection {
    Connection(int fd, FrameConnection::Pools pools) : line(fd, std::move(pools)) {}
    FrameConnection line;
    std::optional<SharedFiles> sharing;  // for a client on this machine
    HeldReads holding;
    std::uint64_t id = 0;
    std::mutex mutex;
    bool owned = false;
    bool gone = false;
  };
  using Shared = std::shared_ptr<Connection>;
  struct ReadJob;
  struct WriteJob;

  Shared attach(int fd);
  void drop(const Shared& connection);
  Shared find(std::uint64_t id) const;
  void work();
  void serve(const Shared& connection);
  void release(const Shared& connection, bool hungry);
  // Registers for the connection's next epoll event: room to send, and if `hungry` also bytes of the peer. REQUIRES:
  // the connection's mutex.
  void arm(Connection& connection, bool hungry);
  void answer(const Shared& connection, Outgoing outgoing);
  void push(const Shared& connection);    // sends what is queued, if no worker owns the connection
  void later(std::function<void()> job);  // queues the job for a worker
  void run_job();
  std::vector<Shared> all() const;
  void release_old();  // called from time to time

  bool handle(const Shared& connection, Frame& frame);  // false: not a frame of this protocol
  bool read(const Shared& connection, Frame& frame);
  void finish(const std::shared_ptr<ReadJob>& job);
  bool share(ReadJob& job);  // answers with places in files; false: the answer must be sent as bytes
  static bool much(const ReadJob& job);
  void fetch(std::shared_ptr<ReadJob> job);  // reads the job's bytes from the disk, then sends `ready`
  void run_fetch(const std::shared_ptr<ReadJob>& job);
  void fetched(ReadJob& job);
  bool go(const Shared& connection, const Head& head);
  void send(ReadJob& job);  // sends the bytes
  bool write(const Shared& connection, Frame& frame);
  bool message(const Shared& connection, Frame& frame);
  void query(const Shared& connection, const Frame& frame);
  void report(const Frame& frame);
  using Targets = std::vector<std::shared_ptr<Target>>;
  // Local targets of a chain: all targets; the head; a serving target. If no target is the head or serves, the
  // functions return any target of the chain, which then refuses the request.
  Targets of_chain(std::uint32_t chain) const;
  std::shared_ptr<Target> head_of(std::uint32_t chain) const;
  std::shared_ptr<Target> serving(std::uint32_t chain);
  std::shared_ptr<Target> of_id(TargetId target) const;
  Pool& pool_for(const Head& head);

  const int epoll_;
  const int jobs_ready_;  // an eventfd that counts jobs_
  const int nowhere_;     // /dev/null
  const std::size_t buffers_;
  std::array<Pool, kHops> pools_;

  mutable std::shared_mutex mutex_;  // guards the maps
  std::unordered_map<std::uint64_t, Shared> connections_;
  std::unordered_map<std::uint32_t, Targets> by_chain_;
  std::unordered_map<TargetId, std::shared_ptr<Target>> by_id_;
  std::uint64_t next_id_ = 1;
  std::atomic<std::size_t> turn_ = 0;

  mutable std::mutex jobs_mutex_;
  std::deque<std::function<void()>> jobs_;
  std::deque<std::shared_ptr<ReadJob>> fetches_;  // wait until fewer workers read from the disk
  std::size_t fetching_ = 0;                      // workers that read bytes, and queued jobs for that

  std::atomic<bool> stopping_ = false;
  std::atomic<std::uint64_t> reads_ = 0, writes_ = 0, messages_ = 0, read_bytes_ = 0, written_bytes_ = 0, refused_ = 0;
  std::atomic<std::uint64_t> local_bytes_ = 0;
  std::atomic<std::uint64_t> mismatched_ = 0, reported_ = 0;
  Meter reading_, writing_;
  std::shared_ptr<Peers> peers_;
  std::vector<std::thread> workers_;
};

}  // namespace ff::fs3::io
