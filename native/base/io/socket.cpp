#include "base/io/socket.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <cstring>

#include "base/error.hpp"

namespace ff {
namespace {

[[noreturn]] void lost() { throw Error(Code::peer_lost, "a process of this host closed its socket"); }

}  // namespace

void send_descriptor(int socket, std::int32_t number, int fd) {
  iovec data{&number, sizeof number};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  ssize_t sent;
  do sent = ::sendmsg(socket, &message, MSG_NOSIGNAL);
  while (sent < 0 && errno == EINTR);
  if (sent != static_cast<ssize_t>(sizeof number)) lost();
}

ReceivedDescriptor receive_descriptor(int socket, int timeout_ms) {
  pollfd wait{socket, POLLIN, 0};
  int ready;
  do ready = ::poll(&wait, 1, timeout_ms);
  while (ready < 0 && errno == EINTR);
  if (ready == 0) {
    throw Error(Code::deadline_exceeded, "a process of this host did not send its segment in time");
  }
  ReceivedDescriptor received{};
  iovec data{&received.number, sizeof received.number};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t got;
  do got = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_WAITALL);
  while (got < 0 && errno == EINTR);
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (got != static_cast<ssize_t>(sizeof received.number) || header == nullptr) lost();
  std::memcpy(&received.fd, CMSG_DATA(header), sizeof received.fd);
  return received;
}

bool hung_up(int socket) {
  pollfd look{socket, POLLRDHUP, 0};
  return ::poll(&look, 1, 0) > 0 && (look.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

bool process_ended(int pidfd) {
  pollfd look{pidfd, POLLIN, 0};
  return ::poll(&look, 1, 0) > 0;
}

}  // namespace ff
