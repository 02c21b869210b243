// Allreduce between hosts: one TCP connection to the next member of a ring and one from the previous.
//
// Thread contract: one thread runs operations; abort() may be called from any thread.
//
// Reduce-scatter, then all-gather (Patarasuk and Yuan 2009): with H members every one sends 2(H-1)/H of the
// tensor. Both halves are one stream of 2(H-1) blocks each way; a byte of block s+1 may leave as soon as the same
// byte of block s has arrived and been added, so that no step waits for a whole block.
#pragma once

#include <atomic>
#include <cstddef>
#include <vector>

#include "hfreduce/types.hpp"
#include "hfreduce/waiting.hpp"

namespace ff::hfreduce {

class Ring {
 public:
  struct End {
    int socket;  // connected, owned by the ring
    int rank;    // of the group, for errors
  };

  Ring(End next, End previous, std::size_t index, std::size_t members);
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // Sums `count` elements at `data` over the ring, in place. Block b is summed in ring order beginning after its
  // owner, rounded once a hop, and scaled with the last addition: bit-identical on all members.
  // `call` is compared with the previous member's.
  void allreduce(const Call& call, char* data, std::size_t count, double scale,
                 Clock::time_point deadline);

  void abort();  // shuts both connections: neighbours notice, one's own waits end
  std::uint64_t bytes_sent() const { return sent_; }

 private:
  struct Block {
    char* data;
    std::size_t bytes;
  };

  void exchange_calls(const Call& call, std::size_t count, Clock::time_point deadline);
  bool send_some(const char* data, std::size_t bytes, std::size_t& done);
  bool receive_some(char* data, std::size_t bytes, std::size_t& done);
  void wait(bool to_send, bool to_receive, Clock::time_point deadline);

  End next_, previous_;
  std::size_t index_, members_;
  std::vector<char> incoming_;
  std::atomic<std::uint64_t> sent_ = 0;
  std::atomic<bool> aborted_ = false;
};

}  // namespace ff::hfreduce
