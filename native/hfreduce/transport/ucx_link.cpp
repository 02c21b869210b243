#include "hfreduce/transport/ucx_link.hpp"

#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "base/error.hpp"
#include "base/process/fork_guard.hpp"

namespace ff::hfreduce::ucx {
namespace {

constexpr std::uint64_t kMagic = 0x3178'6375'2d66'6866;  // "fhf-ucx1"
constexpr std::uint64_t kLongestAddress = 64u << 10;

struct Head {
  std::uint64_t magic, tag, address_bytes;
};

}  // namespace

LinkSocket::~LinkSocket() {
  if (fd_ >= 0) fork_guard::close(fd_);
}

void LinkSocket::open(int fd, const Handshake* handshake) {
  fd_ = fd;
  if (handshake == nullptr) return;
  const Head head{kMagic, handshake->tag, handshake->address.size()};
  out_.assign(reinterpret_cast<const char*>(&head), sizeof head);
  out_ += handshake->address;
}

void LinkSocket::advance() {
  if (fd_ < 0 || ended_) return;
  write();
  read();
  parse();
}

void LinkSocket::write() {
  while (!out_.empty()) {
    const ssize_t n = ::send(fd_, out_.data(), out_.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (n < 0) return out_.clear();  // read() finds the end
    out_.erase(0, static_cast<std::size_t>(n));
  }
}

void LinkSocket::read() {
  std::array<char, 4096> some;
  while (in_.size() <= sizeof(Head) + kLongestAddress + sizeof(std::uint64_t)) {
    const ssize_t n = ::recv(fd_, some.data(), some.size(), MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (n <= 0) {
      ended_ = true;
      return;
    }
    in_.append(some.data(), static_cast<std::size_t>(n));
  }
}

void LinkSocket::parse() {
  const Error violation(Code::collective,
                        "rank " + std::to_string(rank_) + " does not speak the protocol of a UCX link");
  if (side_ == Side::sender && !handshake_done_) {
    Head head;
    if (in_.size() < sizeof head) return;
    std::memcpy(&head, in_.data(), sizeof head);
    if (head.magic != kMagic || head.address_bytes == 0 || head.address_bytes > kLongestAddress) {
      throw Error(violation);
    }
    if (in_.size() < sizeof head + head.address_bytes) return;
    handshake_ = Handshake{head.tag, in_.substr(sizeof head, head.address_bytes)};
    in_.erase(0, sizeof head + head.address_bytes);
    handshake_done_ = true;
  }
  if (in_.size() > sizeof(std::uint64_t)) throw Error(violation);
  if (in_.size() < sizeof(std::uint64_t)) return;
  std::uint64_t count;
  std::memcpy(&count, in_.data(), sizeof count);
  promised_ = count;
}

std::optional<LinkSocket::Handshake> LinkSocket::take_handshake() {
  std::optional<Handshake> taken;
  taken.swap(handshake_);
  return taken;
}

void LinkSocket::send_leave(std::uint64_t done) noexcept {
  if (fd_ < 0 || ended_ || !out_.empty()) return;
  [[maybe_unused]] const ssize_t n = ::send(fd_, &done, sizeof done, MSG_DONTWAIT | MSG_NOSIGNAL);
}

}  // namespace ff::hfreduce::ucx
