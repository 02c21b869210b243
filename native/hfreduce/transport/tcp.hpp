// Bytes over stream sockets: one connected socket per direction and peer, driven by edge-triggered epoll.
//
// Thread contract: as LinkedTransport's.
//
// Bytes go directly from and to the caller's memory: a system call takes as many queued transfers of a link as fit
// (sendmsg, recvmsg), without intermediate copies. A link is `ready` until a system call moves fewer bytes than it was
// given; epoll reports when the link is ready again. No code reads ahead: bytes without a posted receive stay in the
// socket.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "hfreduce/transport/arrivals.hpp"
#include "hfreduce/transport/transport.hpp"

namespace ff::hfreduce {

class TcpTransport final : public LinkedTransport {
 public:
  TcpTransport();
  ~TcpTransport() override;  // closes all links: peers with pending receives learn that this rank left
  TcpTransport(const TcpTransport&) = delete;
  TcpTransport& operator=(const TcpTransport&) = delete;

  void add_outgoing(int rank, int fd) override;
  void add_incoming(int rank, int fd) override;

  void send(int rank, Transfer& transfer) override;
  void receive(int rank, Transfer& transfer) override;
  // After progress() or wait() has thrown, both throw the same error again, and no transfer is accessed any more.
  bool progress() override;
  void wait(std::chrono::milliseconds limit) override;

  void wake() override;
  void abort() override;  // does not notify peers
  std::uint64_t bytes_sent() const override { return sent_; }

 private:
  struct Link {
    int rank;
    bool incoming;
    int fd = -1;
    bool ready = false;  // a system call may move bytes
    bool ended = false;  // the peer has closed its side; bytes that it sent before may still be unread
    std::deque<Transfer*> queue = {};
  };
  using Links = std::map<int, std::unique_ptr<Link>>;

  void add(int rank, int fd, bool incoming);
  void adopt();
  Link& link_to(Links& links, int rank, bool incoming);
  void post(Link& link, Transfer& transfer);
  void poll(int timeout_ms, bool drain_wakes);
  bool move(Link& link);
  void check();
  [[noreturn]] void fail(Error error);

  int epoll_ = -1;
  int wake_ = -1;  // eventfd, registered with a null link
  Links outgoing_, incoming_;
  std::vector<Link*> busy_;  // links with queued transfers
  std::optional<Error> failed_;
  std::atomic<std::uint64_t> sent_ = 0;
  std::atomic<bool> aborted_ = false;

  Arrivals arrivals_;
};

}  // namespace ff::hfreduce
