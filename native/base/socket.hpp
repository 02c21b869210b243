// The few socket calls that the engines share. Descriptors belong to the caller.
#pragma once

#include <cstdint>

namespace ff {

// Sends `number` and a descriptor over a Unix socket. Throws Code::peer_lost if the peer is gone.
void send_descriptor(int socket, std::int32_t number, int fd);

struct ReceivedDescriptor {
  std::int32_t number;
  int fd;  // owned by the receiver
};

// Receives one; waits at most `timeout_ms`. Throws Code::peer_lost or Code::deadline_exceeded.
ReceivedDescriptor receive_descriptor(int socket, int timeout_ms);

// Has the other side closed its end? Never blocks, reads nothing.
bool hung_up(int socket);

// Has the process behind a pidfd ended? Never blocks.
bool process_ended(int pidfd);

}  // namespace ff
