// Bytes over UCX, for RDMA networks: tagged messages between workers, one worker per group.
//
// Thread contract: as LinkedTransport's. A mutex lets UCX see one thread at a time; abort() ends all work in flight in
// the thread that calls it.
//
// A link's socket stays open beside UCX's own connections: see ucx_link.hpp. Only the socket's end means that a peer
// has left. An endpoint that fails while the socket is open is reported a second later. Most likely the peer has broken
// the group because of another rank, and that cause should be reported first.
//
// Messages of a link are done in order. The last message of all is not done before UCX has flushed the worker. Between
// operations no thread calls progress(), so a message that waits in UCX for such a call would not leave this process.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "hfreduce/transport/arrivals.hpp"
#include "hfreduce/transport/transport.hpp"
#include "hfreduce/transport/ucx_link.hpp"
#include "hfreduce/transport/ucx_worker.hpp"

namespace ff::hfreduce {

class UcxTransport final : public LinkedTransport {
 public:
  // Throws Error(collective) if UCX is unavailable: see ucx::Engine.
  UcxTransport();
  // Notifies peers that this rank left; they still get all messages that were done here. In a forked child the
  // destructor closes the child's copies of the sockets and leaves the rest to the parent.
  ~UcxTransport() override;
  UcxTransport(const UcxTransport&) = delete;
  UcxTransport& operator=(const UcxTransport&) = delete;

  void add_outgoing(int rank, int fd) override;
  void add_incoming(int rank, int fd) override;

  void send(int rank, Transfer& transfer) override;
  void receive(int rank, Transfer& transfer) override;
  // After progress() or wait() has thrown, both throw the same error again, and neither transfers nor their memory are
  // accessed any more.
  bool progress() override;
  void wait(std::chrono::milliseconds limit) override;

  void wake() override;
  void abort() override;  // ends all access to transfers and their memory; peers see endpoints fail
  std::uint64_t bytes_sent() const override { return sent_; }  // only payload of messages that are done

 private:
  struct Link;
  struct Message {  // never moves while it is in its link's queue, because UCX has its address
    enum class State { queued, under_way, complete, failed };
    Link* link;
    Transfer* transfer;
    State state = State::queued;
    ucx::Request* request = nullptr;
  };
  using State = Message::State;
  struct Link {
    UcxTransport* owner;
    int rank;
    bool incoming;
    ucx::LinkSocket line;
    ucx::Endpoint* endpoint = nullptr;  // of an outgoing link, after its handshake
    std::uint64_t tag = 0;
    std::deque<Message> messages = {};  // messages that are not done
    std::uint64_t done = 0;             // number of messages that are done
    std::optional<std::chrono::steady_clock::time_point> broken = {};
    std::string why = {};  // the cause if it broke
  };
  using Links = std::map<int, std::unique_ptr<Link>>;

  void add(int rank, int fd, bool incoming);
  void adopt();
  Link& link_to(Links& links, int rank, bool incoming);
  void post(Link& link, Transfer& transfer);
  void hand_over(Message& message);
  void start_endpoint(Link& link, const ucx::LinkSocket::Handshake& handshake);
  bool poll(int timeout_ms, bool drain_wakes);
  void listen(Link& link, bool add);
  bool settle();
  bool settle(Link& link);
  void release_last();
  void break_link(Link& link, ucx::Status status);
  void look_after(Link& link);
  bool lost(Link& link);
  void check();
  [[noreturn]] void fail(Error error);
  void tear_down() noexcept;
  void settle_down() noexcept;
  std::uint64_t new_tag();

  static void on_sent(ucx::Request*, ucx::Status status, void* message);
  static void on_received(ucx::Request*, ucx::Status status, const ucx::Received* received, void* message);
  static void on_error(void* link, ucx::Endpoint*, ucx::Status status);
  static void on_flushed(ucx::Request* request, ucx::Status, void* transport);
  void completed(Message& message, ucx::Status status);

  const unsigned generation_;            // fork generation
  std::unique_ptr<ucx::Engine> engine_;  // null after a failure
  int epoll_ = -1;
  int wake_ = -1;  // eventfd
  std::atomic<std::uint64_t> sent_ = 0;
  std::atomic<bool> aborted_ = false;

  std::mutex work_mutex_;  // guards everything down to arrivals_
  Links outgoing_, incoming_;
  std::set<std::uint64_t> tags_;
  std::vector<Link*> dirty_;     // links with a completed message
  std::vector<Link*> troubled_;  // ended or broken
  std::size_t pending_ = 0;      // messages that are not done
  std::uint64_t posted_ = 0;     // number of messages posted so far
  std::uint64_t flushing_ = 0,
                flushed_ = 0;  // values of posted_ when the current flush (0: none) and the last finished flush began
  bool closing_ = false;       // callbacks have no effect any more
  std::optional<Error> failed_, bad_message_;

  Arrivals arrivals_;
};

}  // namespace ff::hfreduce
