#include "fs3/io/client/local_files.hpp"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/process/fork_guard.hpp"
#include "base/process/worker_pool.hpp"

namespace ff::fs3::io {
namespace {

constexpr std::size_t kLarge = std::size_t{1} << 20;  // reading so many bytes takes longer than waking a thread
constexpr unsigned kThreads = 4;                      // threads of a caller: more do not raise the memory bandwidth

}  // namespace

LocalFiles::~LocalFiles() {
  for (const int fd : slots_) {
    if (fd >= 0) fork_guard::close(fd);
  }
  for (const int fd : came_) ::close(fd);
}

bool LocalFiles::possible(int socket) {
  int domain = 0;
  socklen_t size = sizeof domain;
  return ::getsockopt(socket, SOL_SOCKET, SO_DOMAIN, &domain, &size) == 0 && domain == AF_UNIX;
}

ssize_t LocalFiles::receive(int socket, std::byte* to, std::size_t bytes) {
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kLocalSlots * sizeof(int))> control{};
  iovec part{to, bytes};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const ssize_t got = ::recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (got < 0) return got;
  overflown_ |= (message.msg_flags & MSG_CTRUNC) != 0;
  for (cmsghdr* at = CMSG_FIRSTHDR(&message); at != nullptr; at = CMSG_NXTHDR(&message, at)) {
    if (at->cmsg_level != SOL_SOCKET || at->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (at->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    const std::size_t before = came_.size();
    came_.resize(before + count);
    std::memcpy(came_.data() + before, CMSG_DATA(at), count * sizeof(int));
  }
  return got;
}

bool LocalFiles::take(const ReadPlacement& landing) {
  std::size_t next = 0;
  for (std::size_t n = 0; n < landing.pieces(); ++n) {
    const Place place = landing.place(n);
    int& slot = slots_[place.slot];
    if (place.fresh != 0) {
      if (next == came_.size()) return false;
      if (slot >= 0) fork_guard::close(slot);
      slot = came_[next];
      came_[next++] = -1;
      fork_guard::add(slot);
    }
    if (slot < 0 && landing.bytes(n) != 0) return false;
  }
  const bool all = next == came_.size();
  std::erase(came_, -1);
  return all;
}

void LocalFiles::read(ReadPlacement& landing) {
  bool large = landing.pieces() > 1;
  for (std::size_t n = 0; n < landing.pieces(); ++n) large = large && landing.bytes(n) >= kLarge;
  if (large) {
    std::vector<ReadPlacement> parts = landing.split();
    worker_pool::share(std::min(kThreads, worker_pool::cores()), parts.size(),
                       [&](std::size_t n) { read_part(parts[n]); });
  } else {
    read_part(landing);
  }
  ++done_;
}

void LocalFiles::read_part(ReadPlacement& landing) {
  bool advised = false;
  while (!landing.done()) {
    const Place place = landing.place(landing.piece());
    const int file = slots_[place.slot];
    const std::uint64_t position = place.position + landing.position();
    const auto parts = landing.places_of_one();
    std::size_t got = tries_cache_ ? read_some(file, parts, position) : 0;
    if (got == 0) {
      if (!std::exchange(advised, true)) advise(landing);
      ssize_t read = 0;
      do read = ::preadv(file, parts.data(), static_cast<int>(parts.size()), static_cast<off_t>(position));
      while (read < 0 && errno == EINTR);
      got = read > 0 ? static_cast<std::size_t>(read) : 0;
    }
    if (got == 0) {  // end of the file, or bytes that the disk has lost
      for (const iovec& part : parts) {
        std::memset(part.iov_base, 0, part.iov_len);
        got += part.iov_len;
      }
    }
    landing.landed(got);
  }
}

// Reads from the page cache; returns 0 if the page cache lacks the first byte.
std::size_t LocalFiles::read_some(int file, std::span<const iovec> parts, std::uint64_t position) {
  const ssize_t got =
      ::preadv2(file, parts.data(), static_cast<int>(parts.size()), static_cast<off_t>(position), RWF_NOWAIT);
  if (got < 0 && (errno == EOPNOTSUPP || errno == ENOSYS)) tries_cache_ = false;
  return got > 0 ? static_cast<std::size_t>(got) : 0;
}

// Makes the disk read ahead all remaining small pieces at once. Large pieces are left to the kernel's own read-ahead:
// it fills large folios, which later reads copy up to twice as fast as the single pages that this advice leaves.
void LocalFiles::advise(const ReadPlacement& landing) const {
  for (std::size_t n = landing.piece(); n < landing.pieces(); ++n) {
    const Place place = landing.place(n);
    if (landing.bytes(n) == 0 || landing.bytes(n) >= kLarge) continue;
    ::posix_fadvise(slots_[place.slot], static_cast<off_t>(place.position), static_cast<off_t>(landing.bytes(n)),
                    POSIX_FADV_WILLNEED);
  }
}

}  // namespace ff::fs3::io
