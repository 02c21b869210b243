#include "fs3/io/wire/frame_connection.hpp"

#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <span>

namespace ff::fs3::io {
namespace {

constexpr std::size_t kMostPieces = 64;                               // per system call
constexpr std::size_t kMostDescriptors = 64;                          // per Outgoing
constexpr std::size_t kFileStep = std::size_t{1} << 20;               // bytes per sendfile
alignas(4096) constexpr std::array<std::byte, 64 << 10> kZeros = {};  // replaces bytes beyond a file's end

// REQUIRES: `control` outlives the sending.
void attach(msghdr& message, std::span<char> control, std::span<const int> descriptors) {
  message.msg_control = control.data();
  message.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
  cmsghdr* const first = CMSG_FIRSTHDR(&message);
  first->cmsg_level = SOL_SOCKET;
  first->cmsg_type = SCM_RIGHTS;
  first->cmsg_len = CMSG_LEN(descriptors.size_bytes());
  std::memcpy(CMSG_DATA(first), descriptors.data(), descriptors.size_bytes());
}

}  // namespace

void Outgoing::add(const void* memory, std::size_t bytes) {
  if (bytes == 0) return;
  const auto* from = static_cast<const std::byte*>(memory);
  if (!pieces.empty() && pieces.back().memory != nullptr && pieces.back().memory + pieces.back().bytes == from) {
    pieces.back().bytes += bytes;
    return;
  }
  pieces.push_back({from, -1, 0, bytes});
}

void Outgoing::add_file(int file, std::uint64_t position, std::size_t bytes) {
  if (bytes != 0) pieces.push_back({nullptr, file, position, bytes});
}

FrameConnection::FrameConnection(int fd, Pools pools) : fd_(fd), pools_(std::move(pools)), inbox_(kInbox) {}

FrameConnection::~FrameConnection() { ::close(fd_); }

bool FrameConnection::fill() {
  if (begin_ == end_) begin_ = end_ = 0;
  const ssize_t got = ::recv(fd_, inbox_.data() + end_, inbox_.size() - end_, MSG_DONTWAIT);
  if (got > 0) {
    end_ += static_cast<std::size_t>(got);
    return true;
  }
  if (got == 0 || (errno != EAGAIN && errno != EINTR)) shut();
  return got < 0 && errno == EINTR;
}

// Moves bytes of the inbox to `to`, until `have_` reaches `bytes` or the inbox is empty.
std::size_t FrameConnection::take(std::byte* to, std::size_t bytes) {
  const std::size_t step = std::min(bytes - have_, end_ - begin_);
  if (step != 0) std::memcpy(to + have_, inbox_.data() + begin_, step);  // an empty table has no address
  begin_ += step;
  have_ += step;
  return bytes - have_;
}

FrameConnection::Got FrameConnection::receive(Frame& frame) {
  for (;;) {
    if (broken()) return Got::broken;
    if (part_ == Part::head) {
      if (take(reinterpret_cast<std::byte*>(&next_.head), sizeof(Head)) == 0) {
        if (!sound(next_.head)) {
          shut();
          continue;
        }
        next_.table.resize(next_.head.table_bytes);
        part_ = Part::table;
        have_ = 0;
        continue;
      }
    } else if (part_ == Part::table) {
      if (take(next_.table.data(), next_.table.size()) == 0) {
        part_ = Part::payload;
        have_ = 0;
        continue;
      }
    } else {
      const Got got = payload(frame);
      if (got != Got::nothing) return got;
      return broken() ? Got::broken : Got::nothing;
    }
    if (!fill()) return broken() ? Got::broken : Got::nothing;
  }
}

FrameConnection::Got FrameConnection::payload(Frame& frame) {
  const std::size_t bytes = next_.head.payload_bytes;
  if (bytes != 0 && !next_.payload) {
    Pool& pool = pools_(next_.head);
    next_.payload = pool.take(bytes);
    if (!next_.payload) {
      starved_ = &pool;
      return Got::starved;
    }
  }
  while (have_ < bytes) {
    if (begin_ != end_) {
      take(next_.payload.data(), bytes);
      continue;
    }
    const ssize_t got = ::recv(fd_, next_.payload.data() + have_, bytes - have_, MSG_DONTWAIT);
    if (got > 0) {
      have_ += static_cast<std::size_t>(got);
    } else if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
      shut();
      return Got::broken;
    } else if (errno == EAGAIN) {
      return Got::nothing;
    }
  }
  frame = std::move(next_);
  next_ = Frame{};
  part_ = Part::head;
  have_ = 0;
  return Got::frame;
}

void FrameConnection::send(Outgoing outgoing) {
  std::size_t bytes = 0;
  for (const auto& piece : outgoing.pieces) bytes += piece.bytes;
  std::lock_guard lock(mutex_);
  if (broken_ || bytes == 0) return;
  waiting_ += bytes;
  out_.push_back(std::move(outgoing));
}

bool FrameConnection::flush() {
  std::unique_lock lock(mutex_);
  if (sending_) return false;
  sending_ = true;
  std::deque<Outgoing> gone;  // destroyed without the lock
  for (bool full = false; !full && !broken_ && !out_.empty();) {
    const Outgoing& front = out_.front();  // stays in place while other threads append
    const std::size_t piece = piece_, from = sent_;
    lock.unlock();
    const Pushed pushed = push_one(front, piece, from);
    lock.lock();
    if (pushed.broke) fail();
    if (broken_) forget(gone);
    else advance(pushed.bytes, gone);
    full = pushed.full;
    if (gone.empty()) continue;
    lock.unlock();
    gone.clear();
    lock.lock();
  }
  if (broken_ && !out_.empty()) {
    forget(gone);
    lock.unlock();
    gone.clear();
    lock.lock();
  }
  sending_ = false;
  idle_.notify_all();
  return out_.empty();
}

// REQUIRES: mutex_. Accounts for `bytes` of the next pieces that were sent.
void FrameConnection::advance(std::size_t bytes, std::deque<Outgoing>& gone) {
  waiting_ -= bytes;
  while (!out_.empty()) {
    auto& front = out_.front();
    if (piece_ == front.pieces.size()) {
      gone.push_back(std::move(front));
      out_.pop_front();
      piece_ = 0;
      continue;
    }
    const std::size_t step = std::min(bytes, front.pieces[piece_].bytes - sent_);
    bytes -= step;
    sent_ += step;
    if (sent_ < front.pieces[piece_].bytes) return;
    ++piece_;
    sent_ = 0;
  }
}

// Makes one system call for the next piece, without the lock.
FrameConnection::Pushed FrameConnection::push_one(const Outgoing& front, std::size_t at, std::size_t skip) const {
  const auto& piece = front.pieces[at];
  const bool begins = at == 0 && skip == 0;
  ssize_t done = 0;
  if (piece.memory == nullptr) {
    off_t from = static_cast<off_t>(piece.position + skip);
    const std::size_t left = piece.bytes - skip;
    done = ::sendfile(fd_, piece.file, &from, std::min(left, kFileStep));
    if (done == 0) done = ::send(fd_, kZeros.data(), std::min(left, kZeros.size()), MSG_NOSIGNAL | MSG_DONTWAIT);
  } else {
    std::array<iovec, kMostPieces> parts;
    std::size_t count = 0;
    bool more = false;
    for (; at < front.pieces.size() && !more; ++at) {
      const auto& next = front.pieces[at];
      more = next.memory == nullptr || count == parts.size();
      if (more) break;
      parts[count++] = {const_cast<std::byte*>(next.memory + skip), next.bytes - skip};
      skip = 0;
    }
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = count;
    alignas(cmsghdr) std::array<char, CMSG_SPACE(kMostDescriptors * sizeof(int))> control{};
    if (begins && !front.descriptors.empty()) attach(message, control, front.descriptors);
    done = ::sendmsg(fd_, &message, MSG_NOSIGNAL | MSG_DONTWAIT | (more ? MSG_MORE : 0));
  }
  if (done > 0) return {.bytes = static_cast<std::size_t>(done)};
  const bool again = done < 0 && errno == EINTR;
  const bool full = done < 0 && errno == EAGAIN;
  return {.full = full, .broke = !again && !full};
}

// Breaks the connection. An unreadable file breaks it, too, because part of the answer is sent already.
// REQUIRES: mutex_.
void FrameConnection::fail() {
  broken_ = true;
  std::deque<Outgoing> gone;
  if (!sending_) forget(gone);  // otherwise the sending thread does
  ::shutdown(fd_, SHUT_RDWR);
}

// REQUIRES: mutex_, and no thread is sending.
void FrameConnection::forget(std::deque<Outgoing>& gone) {
  std::move(out_.begin(), out_.end(), std::back_inserter(gone));
  out_.clear();
  piece_ = sent_ = waiting_ = 0;
}

std::size_t FrameConnection::waiting() const {
  std::lock_guard lock(mutex_);
  return waiting_;
}

bool FrameConnection::broken() const {
  std::lock_guard lock(mutex_);
  return broken_;
}

void FrameConnection::shut() {
  std::lock_guard lock(mutex_);
  if (!broken_) fail();
}

void FrameConnection::drop_holders() {
  flush();
  std::unique_lock lock(mutex_);
  idle_.wait(lock, [this] { return !sending_; });  // sent pieces stay in out_ until the sending thread has the lock
  const bool held = std::ranges::any_of(out_, [](const Outgoing& one) { return !one.holds.empty(); });
  if (held && !broken_) fail();
}

}  // namespace ff::fs3::io
