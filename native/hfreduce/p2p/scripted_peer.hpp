// A rank for the tests of P2PEngine. The test plays its peer, frame by frame.
#pragma once

#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <thread>
#include <utility>

#include "hfreduce/p2p/test_ranks.hpp"

namespace ff::hfreduce::test {

// Rank 1 of 2 with a peer, rank 0, that the test plays on raw sockets.
struct ScriptedPeer {
  P2PEngine post{1, 2};
  int to = -1;    // the test's end of the incoming link of `post`
  int from = -1;  // the test's end of the outgoing link of `post`
  int own = -1;   // duplicate of the other end of the outgoing link

  explicit ScriptedPeer(bool incoming = true, bool outgoing = true, bool local = false) {
    int ends[2];
    if (incoming) {
      socket_pair(false, ends);
      to = ends[0];
      post.add_incoming(0, ends[1]);
    }
    if (outgoing) {
      socket_pair(false, ends);
      from = ends[0];
      own = ::dup(ends[1]);
      post.add_outgoing(0, ends[1], local);
    }
  }
  ~ScriptedPeer() { close(); }
  // Makes the send buffer of the outgoing link smaller than a chunk, so that a send stops in the middle of a chunk.
  void narrow() const {
    const int bytes = 64 << 10;
    CHECK(::setsockopt(own, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes) == 0);
  }
  void close() {
    for (int* fd : {&to, &from, &own}) {
      if (*fd >= 0) ::close(std::exchange(*fd, -1));
    }
  }
  // Writes all bytes; P2PEngine may end the link meanwhile.
  static void put(int fd, const void* data, std::size_t bytes) {
    const auto* p = static_cast<const char*>(data);
    while (bytes > 0) {
      const ssize_t n = ::send(fd, p, bytes, MSG_NOSIGNAL);
      if (n <= 0) return;
      p += n, bytes -= static_cast<std::size_t>(n);
    }
  }
  static void put(int fd, const mail::Header& header) { put(fd, &header, sizeof header); }
  // Waits until P2PEngine has read all written bytes.
  static void settle(int fd) {
    for (int unread = 1; unread > 0;) {
      CHECK(::ioctl(fd, SIOCOUTQ, &unread) == 0);
      std::this_thread::yield();
    }
  }
  static Bytes get(int fd, std::size_t bytes) {
    Bytes data(bytes);
    CHECK(::recv(fd, data.data(), bytes, MSG_WAITALL) == static_cast<ssize_t>(bytes));
    return data;
  }
  static mail::Header get(int fd) {
    mail::Header header;
    std::memcpy(&header, get(fd, sizeof header).data(), sizeof header);
    return header;
  }
};

}  // namespace ff::hfreduce::test
