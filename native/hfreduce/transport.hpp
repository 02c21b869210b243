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

// What a transport throws for a peer that is gone.
inline Error left(int rank) {
  return {Code::rank_failed, "rank " + std::to_string(rank) + " died or left the group", rank};
}

// One message under way. Owned by the caller, who keeps it and its bytes in place until it is done or the
// transport is gone.
struct Transfer {
  char* data = nullptr;
  std::size_t bytes = 0;
  std::size_t moved = 0;  // for the transport
  bool done = false;      // sent: the bytes may be reused; received: the bytes are there
};

class Transport {
 public:
  virtual ~Transport() = default;

  // Messages of one pair and direction arrive in the order in which they were posted on both sides, and must have
  // equal lengths there (the caller compares calls before it trusts a length). A message of 0 bytes is done at
  // once and never travels. Throws Error(rank_failed, rank) when the peer is known to be gone.
  virtual void send(int rank, Transfer& transfer) = 0;
  virtual void receive(int rank, Transfer& transfer) = 0;

  // Moves what can be moved without blocking; true if anything moved. Throws Error(rank_failed, rank) if a
  // peer with which transfers are pending has gone, Error(collective) after abort().
  virtual bool progress() = 0;
  // Sleeps until progress() may move something, wake() was called, or `limit` has passed.
  virtual void wait(std::chrono::milliseconds limit) = 0;

  virtual void wake() = 0;
  virtual void abort() = 0;
  virtual std::uint64_t bytes_sent() const = 0;  // payload and headers handed to the network so far
};

// A transport of links, each of one direction, that begin as connected sockets.
class LinkedTransport : public Transport {
 public:
  // The socket of the link to send to `rank` over, or to receive from it: connected, of stream type (TCP or
  // Unix), authenticated, used for nothing else. Owned by the transport from the call on. From any thread, also
  // after transfers with that rank were posted: they wait for the link. Throws Code::invalid if there is one already.
  virtual void add_outgoing(int rank, int fd) = 0;
  virtual void add_incoming(int rank, int fd) = 0;
};

}  // namespace ff::hfreduce
