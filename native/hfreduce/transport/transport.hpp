// Bytes between ranks of different hosts. Implementations: tcp.cpp, ucx.cpp; a simulated one in tests.
//
// Thread contract: one thread at a time calls send(), receive(), progress() and wait(); wake(), abort() and
// bytes_sent() may be called from any thread.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/error.hpp"

namespace ff::hfreduce {

// Returns the error that a transport throws for a peer that is gone.
inline Error left(int rank) {
  return {Code::rank_failed, "rank " + std::to_string(rank) + " died or left the group", rank};
}

// One message in flight. The caller owns it, and keeps it and its bytes in place until the message is done or the
// transport is gone.
struct Transfer {
  char* data = nullptr;
  std::size_t bytes = 0;
  std::size_t moved = 0;  // used by the transport
  bool done = false;      // sent: the bytes may be reused; received: the bytes have arrived
};

class Transport {
 public:
  virtual ~Transport() = default;

  // Messages of one pair and direction arrive in the order in which both sides posted them. Both sides must give equal
  // lengths; a transport need not detect a difference. Therefore a receiver first receives and compares the sender's
  // `Call` (types.hpp), whose length is fixed. A message of 0 bytes is done at once and is not transmitted. Throws
  // Error(rank_failed, rank) if the peer is known to be gone.
  virtual void send(int rank, Transfer& transfer) = 0;
  virtual void receive(int rank, Transfer& transfer) = 0;

  // Moves as many bytes as possible without blocking; returns true if anything moved. Throws Error(rank_failed, rank)
  // if a peer with pending transfers has gone, Error(collective) after abort().
  virtual bool progress() = 0;
  // Sleeps until progress() may move something, wake() is called, or `limit` has passed.
  virtual void wait(std::chrono::milliseconds limit) = 0;

  virtual void wake() = 0;
  virtual void abort() = 0;
  virtual std::uint64_t bytes_sent() const = 0;  // payload and headers handed to the network so far
};

// A transport made of one-directional links, which start as connected sockets.
class LinkedTransport : public Transport {
 public:
  // Adds the socket of the link to send to `rank`, or to receive from it: a connected stream socket (TCP or Unix),
  // authenticated, used for nothing else. The transport owns the socket from the call on. Any thread may call. A
  // transfer that is posted before its link is added waits for the link. Throws Code::invalid if the link exists
  // already.
  virtual void add_outgoing(int rank, int fd) = 0;
  virtual void add_incoming(int rank, int fd) = 0;
};

}  // namespace ff::hfreduce
