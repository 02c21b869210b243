#include "hfreduce/ring.hpp"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace ff::hfreduce {
namespace {

constexpr std::size_t kIncomingBytes = 256u << 10;  // added while they are still in cache
constexpr int kGlanceMs = 100;

void prepare(int socket) {
  ::fcntl(socket, F_SETFL, ::fcntl(socket, F_GETFL) | O_NONBLOCK);
  const int on = 1;
  ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

}  // namespace

Ring::Ring(End next, End previous, std::size_t index, std::size_t members)
    : next_(next), previous_(previous), index_(index), members_(members), incoming_(kIncomingBytes) {
  prepare(next.socket);
  prepare(previous.socket);
}

Ring::~Ring() {
  ::close(next_.socket);
  ::close(previous_.socket);
}

void Ring::abort() {
  aborted_ = true;
  ::shutdown(next_.socket, SHUT_RDWR);
  ::shutdown(previous_.socket, SHUT_RDWR);
}

bool Ring::send_some(const char* data, std::size_t bytes, std::size_t& done) {
  const ssize_t n = ::send(next_.socket, data, bytes, MSG_NOSIGNAL);
  if (n > 0) {
    done += static_cast<std::size_t>(n);
    sent_ += static_cast<std::uint64_t>(n);
    return true;
  }
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  throw Error(Code::rank_failed,
              "the connection to rank " + std::to_string(next_.rank) + " broke", next_.rank);
}

bool Ring::receive_some(char* data, std::size_t bytes, std::size_t& done) {
  const ssize_t n = ::recv(previous_.socket, data, bytes, 0);
  if (n > 0) {
    done += static_cast<std::size_t>(n);
    return true;
  }
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  throw Error(Code::rank_failed,
              "rank " + std::to_string(previous_.rank) + " died or left the group", previous_.rank);
}

void Ring::wait(bool to_send, bool to_receive, Clock::time_point deadline) {
  if (aborted_) throw Error(Code::collective, "the group was aborted");
  if (Clock::now() >= deadline) {
    const int late = to_receive ? previous_.rank : next_.rank;
    throw Error(Code::rank_failed,
                "rank " + std::to_string(late) + " did not take part within the timeout", late);
  }
  pollfd ends[2] = {{next_.socket, static_cast<short>(to_send ? POLLOUT : 0), 0},
                    {previous_.socket, static_cast<short>(to_receive ? POLLIN : 0), 0}};
  ::poll(ends, 2, kGlanceMs);
}

// A header a stream: a rank that calls something else is told so instead of being sent garbage.
void Ring::exchange_calls(const Call& call, std::size_t count, Clock::time_point deadline) {
  struct {
    Call call;
    std::uint64_t count;
  } mine{call, count}, theirs{};
  std::size_t out = 0, in = 0;
  while (out < sizeof mine || in < sizeof theirs) {
    bool moved = false;
    if (out < sizeof mine) {
      moved |= send_some(reinterpret_cast<const char*>(&mine) + out, sizeof mine - out, out);
    }
    if (in < sizeof theirs) {
      moved |= receive_some(reinterpret_cast<char*>(&theirs) + in, sizeof theirs - in, in);
    }
    if (!moved) wait(out < sizeof mine, in < sizeof theirs, deadline);
  }
  if (theirs.call != mine.call || theirs.count != mine.count) {
    throw Error(Code::collective, "hosts disagree: this host calls " + to_string(mine.call) +
                                      ", the host of rank " + std::to_string(previous_.rank) +
                                      " calls " + to_string(theirs.call));
  }
}

void Ring::allreduce(const Call& call, char* data, std::size_t count, double scale,
                     Clock::time_point deadline) {
  exchange_calls(call, count, deadline);
  const std::size_t width = size_of(call.dtype);
  const std::size_t rounds = 2 * (members_ - 1);
  const auto block = [&](std::size_t b) {
    b %= members_;
    const std::size_t begin = slice_begin(count, call.dtype, b, members_);
    const std::size_t end = slice_begin(count, call.dtype, b + 1, members_);
    return Block{data + begin * width, (end - begin) * width};
  };
  // In round s member i sends block i-s and receives block i-s-1, which it sends in round s+1.
  const auto outgoing = [&](std::size_t s) { return block(index_ + 2 * members_ - s); };
  const auto arriving = [&](std::size_t s) { return block(index_ + 2 * members_ - s - 1); };

  std::size_t send_round = 0, sent = 0;
  std::size_t receive_round = 0, received = 0;  // bytes of the arriving block that are final
  std::size_t pending = 0;                      // bytes in incoming_ not added yet
  while (send_round < rounds || receive_round < rounds) {
    bool moved = false;
    if (send_round < rounds) {
      const Block b = outgoing(send_round);
      std::size_t ready = b.bytes;
      if (send_round > receive_round) ready = send_round == receive_round + 1 ? received : 0;
      if (sent < ready) moved |= send_some(b.data + sent, ready - sent, sent);
      if (sent == b.bytes && send_round <= receive_round) {
        ++send_round, sent = 0, moved = true;
      }
    }
    if (receive_round < rounds) {
      const Block b = arriving(receive_round);
      if (receive_round < members_ - 1) {
        const std::size_t left = b.bytes - received - pending;
        const std::size_t room = std::min(left, incoming_.size() - pending);
        if (room > 0) moved |= receive_some(incoming_.data() + pending, room, pending);
        const std::size_t whole = pending / width;
        if (whole > 0) {
          void* own = b.data + received;
          const void* terms[2] = {incoming_.data(), own};
          const bool last = receive_round == members_ - 2;
          kernel_of(call.dtype)(&own, 1, terms, 2, whole, last ? scale : 1.0);
          received += whole * width;
          pending -= whole * width;
          std::memmove(incoming_.data(), incoming_.data() + whole * width, pending);
        }
      } else if (received < b.bytes) {
        moved |= receive_some(b.data + received, b.bytes - received, received);
      }
      if (received == b.bytes) {
        ++receive_round, received = 0, moved = true;
      }
    }
    if (!moved) wait(send_round < rounds, receive_round < rounds, deadline);
  }
}

}  // namespace ff::hfreduce
