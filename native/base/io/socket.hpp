// Socket calls that the engines share. Descriptors belong to the caller.
#pragma once

#include <cstdint>

namespace ff {

// Sends `number` and a descriptor over a Unix socket. Throws Code::peer_lost if the peer is gone.
void send_descriptor(int socket, std::int32_t number, int fd);

struct ReceivedDescriptor {
  std::int32_t number;
  int fd;  // owned by the receiver
};

// Receives one descriptor; waits at most `timeout_ms`. Throws Code::peer_lost or Code::deadline_exceeded.
ReceivedDescriptor receive_descriptor(int socket, int timeout_ms);

// Returns whether the peer has closed its end. Never blocks, reads nothing.
bool hung_up(int socket);

// Returns whether the process behind a pidfd has ended. Never blocks.
bool process_ended(int pidfd);

}  // namespace ff
