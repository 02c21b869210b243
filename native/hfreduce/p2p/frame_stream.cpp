#include "hfreduce/p2p/frame_stream.hpp"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/process/fork_guard.hpp"

namespace ff::hfreduce::mail {
namespace {

constexpr int kUnixBufferBytes = 1 << 20;  // TCP sizes its own buffers

}  // namespace

Error gone(int rank) {
  return Error(Code::rank_failed, "rank " + std::to_string(rank) + " died or left the group", rank);
}

void Stream::attach(int fd) {
  fd_ = fd;
  fork_guard::add(fd);
  buffer_ = std::make_unique<char[]>(kBuffer);
  ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
  int domain = 0;
  socklen_t length = sizeof domain;
  ::getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &length);
  tcp_ = domain != AF_UNIX;
  if (tcp_) {
    const int on = 1;
    ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  } else {
    ::setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &kUnixBufferBytes, sizeof kUnixBufferBytes);
  }
}

void Stream::close() {
  const int fd = release();
  if (fd >= 0) fork_guard::close(fd);
}

int Stream::release() {
  for (const int fd : descriptors_) ::close(fd);
  descriptors_.clear();
  begin_ = end_ = 0;
  return std::exchange(fd_, -1);
}

Stream::Read Stream::read(char* target, std::size_t wanted) {
  if (begin_ > 0) {
    std::memmove(buffer_.get(), buffer_.get() + begin_, buffered());
    end_ -= begin_;
    begin_ = 0;
  }
  iovec parts[2] = {{target, wanted}, {buffer_.get() + end_, kBuffer - end_}};
  msghdr message{};
  message.msg_iov = wanted > 0 ? parts : parts + 1;
  message.msg_iovlen = wanted > 0 ? 2 : 1;
  alignas(cmsghdr) char control[CMSG_SPACE(kDescriptors * sizeof(int))];
  if (!tcp_) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
  }
  const ssize_t n = ::recvmsg(fd_, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return {};
  if (n <= 0) throw gone(peer_);
  if (!tcp_) keep_descriptors(message);
  const auto got = static_cast<std::size_t>(n);
  const std::size_t direct = std::min(got, wanted);
  end_ += got - direct;
  return {got, direct, direct == wanted && end_ == kBuffer};
}

void Stream::keep_descriptors(msghdr& message) {
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr; part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    const std::size_t before = descriptors_.size();
    descriptors_.resize(before + count);
    std::memcpy(descriptors_.data() + before, CMSG_DATA(part), count * sizeof(int));
  }
  if (descriptors_.size() > kDescriptors) throw Malformed(peer_, "more descriptors than its frames need");
}

std::vector<int> Stream::take_descriptors(std::size_t count) {
  if (count > descriptors_.size()) throw Malformed(peer_, "an offer without its descriptors");
  const auto end = descriptors_.begin() + static_cast<std::ptrdiff_t>(count);
  std::vector<int> taken(descriptors_.begin(), end);
  descriptors_.erase(descriptors_.begin(), end);
  return taken;
}

std::size_t Stream::take(char* target, std::size_t wanted) {
  const std::size_t n = std::min(wanted, buffered());
  if (target != nullptr && n > 0) std::memcpy(target, buffer_.get() + begin_, n);
  begin_ += n;
  return n;
}

bool Stream::next(Header& header) {
  if (buffered() < sizeof header) return false;
  take(reinterpret_cast<char*>(&header), sizeof header);
  if (header.magic != Header::kMagic) throw Malformed(peer_, "not a frame");
  return true;
}

std::size_t Stream::write(const char* head, std::size_t head_bytes, const char* body, std::size_t body_bytes,
                          const std::vector<int>& descriptors) {
  iovec parts[2] = {{const_cast<char*>(head), head_bytes}, {const_cast<char*>(body), body_bytes}};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  alignas(cmsghdr) char control[CMSG_SPACE(kDescriptors * sizeof(int))] = {};
  if (!descriptors.empty()) {
    const std::size_t bytes = descriptors.size() * sizeof(int);
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(bytes);
    cmsghdr* part = CMSG_FIRSTHDR(&message);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(bytes);
    std::memcpy(CMSG_DATA(part), descriptors.data(), bytes);
  }
  const ssize_t n = ::sendmsg(fd_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (n >= 0) return static_cast<std::size_t>(n);
  if (errno == EAGAIN || errno == EINTR) return 0;
  throw gone(peer_);
}

}  // namespace ff::hfreduce::mail
