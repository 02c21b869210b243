#include "fs3/io/client/lane.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.hpp"
#include "base/process/fork_guard.hpp"

namespace ff::fs3::io {
namespace {

constexpr std::size_t kRounds = 8;        // maximum rounds, of ReadPlacement::kAtOnce bytes each, of one advance()
constexpr std::size_t kMostParts = 1024;  // maximum number of iovecs of one sendmsg

ReadEntry read_entry(const Piece& piece) {
  ReadEntry entry;
  entry.inode = piece.chunk.inode;
  entry.index = piece.chunk.index;
  entry.chain = piece.chain;
  entry.chain_version = piece.chain_version;
  entry.offset = piece.offset;
  entry.length = piece.length;
  return entry;
}

WriteEntry write_entry(const Piece& piece, std::uint64_t client) {
  WriteEntry entry;
  entry.inode = piece.chunk.inode;
  entry.client = client;
  entry.seq = piece.seq;
  entry.channel = piece.channel;
  entry.index = piece.chunk.index;
  entry.chain = piece.chain;
  entry.chain_version = piece.chain_version;
  entry.offset = piece.offset;
  entry.length = piece.length;
  entry.crcs = piece.carries() ? static_cast<std::uint32_t>(piece.crcs.size()) : 0;
  entry.kind = piece.kind;
  return entry;
}

QueryEntry query_entry(const Piece& piece) {
  return {piece.chunk.inode, piece.chain, piece.chain_version, piece.chunk.index, piece.stride};
}

FrameKind answer_to(FrameKind kind) {
  if (kind == FrameKind::read) return FrameKind::read_answer;
  return kind == FrameKind::write ? FrameKind::write_answer : FrameKind::query_answer;
}

std::vector<std::byte> read_table(std::span<Piece* const> pieces) {
  std::vector<std::byte> table(pieces.size() * sizeof(ReadEntry));
  for (std::size_t n = 0; n < pieces.size(); ++n) put(table, n * sizeof(ReadEntry), read_entry(*pieces[n]));
  return table;
}

std::vector<std::byte> write_table(std::span<Piece* const> pieces, std::uint64_t client) {
  std::size_t crcs = 0;
  for (const Piece* piece : pieces) crcs += piece->carries() ? piece->crcs.size() : 0;
  std::vector<std::byte> table(pieces.size() * sizeof(WriteEntry) + crcs * sizeof(std::uint32_t));
  std::size_t crc_at = pieces.size() * sizeof(WriteEntry);
  for (std::size_t n = 0; n < pieces.size(); ++n) {
    const Piece& piece = *pieces[n];
    put(table, n * sizeof(WriteEntry), write_entry(piece, client));
    if (!piece.carries()) continue;
    std::memcpy(table.data() + crc_at, piece.crcs.data(), piece.crcs.size() * sizeof(std::uint32_t));
    crc_at += piece.crcs.size() * sizeof(std::uint32_t);
  }
  return table;
}

std::vector<std::byte> query_table(std::span<Piece* const> pieces) {
  std::vector<std::byte> table(pieces.size() * sizeof(QueryEntry));
  for (std::size_t n = 0; n < pieces.size(); ++n) {
    const Piece& piece = *pieces[n];
    put(table, n * sizeof(QueryEntry), query_entry(piece));
  }
  return table;
}

}  // namespace

Link::Link(int fd, bool local) : fd_(fd) {
  if (::fcntl(fd_, F_SETFL, ::fcntl(fd_, F_GETFL) | O_NONBLOCK) != 0) {
    const int error = errno;
    ::close(fd_);
    throw_errno("cannot set up a connection to a storage node", error);
  }
  fork_guard::add(fd_);
  if (local && LocalFiles::possible(fd_)) local_ = std::make_unique<LocalFiles>();
}

Link::~Link() { fork_guard::close(fd_); }

// ---- Sending -----------------------------------------------------------------------------------------------------

void Link::post(Request request, std::uint64_t client) {
  request.id = next_id_++;
  request.posted = Request::Clock::now();
  Head head;
  head.kind = request.kind;
  head.count = static_cast<std::uint16_t>(request.pieces.size());
  head.request = request.id;
  std::vector<std::byte> table;
  std::vector<iovec> payload;
  if (request.kind == FrameKind::read) {
    table = read_table(request.pieces);
    if (local_) head.flags = kLocal;
    if (request.held) head.flags |= kHold;
  } else if (request.kind == FrameKind::query_last) table = query_table(request.pieces);
  else {
    table = write_table(request.pieces, client);
    for (const Piece* piece : request.pieces) {
      if (piece->carries()) payload.push_back({piece->memory, piece->length});
    }
  }
  send_frame(head, std::move(table), std::move(payload));
  outstanding_.push_back(std::move(request));
}

void Link::send_frame(Head head, std::vector<std::byte> table, std::vector<iovec> payload) {
  head.table_bytes = static_cast<std::uint32_t>(table.size());
  if (local_) head.done = local_->done();
  for (const iovec& part : payload) head.payload_bytes += part.iov_len;
  Unsent frame;
  frame.bytes.resize(sizeof head + table.size());
  put(frame.bytes, 0, head);
  std::copy(table.begin(), table.end(), frame.bytes.begin() + sizeof head);
  frame.parts.push_back({frame.bytes.data(), frame.bytes.size()});
  frame.parts.insert(frame.parts.end(), payload.begin(), payload.end());
  unsent_.push_back(std::move(frame));  // `bytes` keeps its address
}

void Link::go(std::uint64_t request) {
  const auto held = std::find_if(outstanding_.begin(), outstanding_.end(),
                                 [request](const Request& one) { return one.id == request; });
  held->permitted = true;
  Head head;
  head.kind = FrameKind::go;
  head.count = 1;
  head.request = request;
  send_frame(head, {}, {});
}

bool Link::flush() {
  while (!unsent_.empty()) {
    Unsent& frame = unsent_.front();
    msghdr message{};
    message.msg_iov = frame.parts.data() + frame.at;
    message.msg_iovlen = std::min(frame.parts.size() - frame.at, kMostParts);
    const ssize_t sent = ::sendmsg(fd_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
    std::size_t left = static_cast<std::size_t>(sent);
    while (frame.at < frame.parts.size() && left >= frame.parts[frame.at].iov_len)
      left -= frame.parts[frame.at++].iov_len;
    if (frame.at == frame.parts.size()) {
      unsent_.pop_front();
    } else {
      iovec& part = frame.parts[frame.at];
      part = {static_cast<std::byte*>(part.iov_base) + left, part.iov_len - left};
    }
  }
  return true;
}

short Link::events() const {
  return static_cast<short>((outstanding_.empty() ? 0 : POLLIN) | (unsent_.empty() ? 0 : POLLOUT));
}

bool Link::quiet() const {
  std::byte byte;
  return ::recv(fd_, &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
}

// ---- Receiving ---------------------------------------------------------------------------------------------------

bool Link::advance(std::vector<Request>& answered) {
  if (!broken_ && flush() && receive(answered) && flush()) return true;
  give_up(answered);
  return false;
}

void Link::give_up(std::vector<Request>& answered) {
  broken_ = true;
  unsent_.clear();
  ready_.clear();
  for (Request& request : outstanding_) {
    for (Piece* piece : request.pieces) {
      if (piece->outcome == Outcome::open) piece->outcome = Outcome::lost;
    }
    answered.push_back(std::move(request));
  }
  outstanding_.clear();
}

bool Link::fill(std::byte* to, std::size_t bytes) {
  while (have_ < bytes) {
    const ssize_t got =
        local_ ? local_->receive(fd_, to + have_, bytes - have_) : ::recv(fd_, to + have_, bytes - have_, MSG_DONTWAIT);
    if (got > 0) {
      have_ += static_cast<std::size_t>(got);
    } else if (got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) {
      broken_ = true;
      return false;
    } else if (errno != EINTR) {
      drained_ = true;
      return false;
    }
  }
  have_ = 0;
  return true;
}

bool Link::receive(std::vector<Request>& answered) {
  drained_ = false;
  for (std::size_t round = 0; round < kRounds && !drained_ && !broken_ && !outstanding_.empty();) {
    if (part_ == Part::head) {
      if (!fill(reinterpret_cast<std::byte*>(&head_), sizeof head_)) continue;
      if (!began()) return false;
      if (head_.kind == FrameKind::ready) continue;
      table_.resize(head_.table_bytes);
      part_ = Part::table;
    } else if (part_ == Part::table) {
      if (!fill(table_.data(), table_.size())) continue;
      if (!tabled(answered)) return false;
    } else {
      ++round;
      if (!land()) continue;
      finish(answered);
    }
  }
  return !broken_;
}

bool Link::began() {
  if (!sound(head_)) return false;
  answering_ = std::find_if(outstanding_.begin(), outstanding_.end(),
                            [this](const Request& request) { return request.id == head_.request; });
  if (answering_ == outstanding_.end()) return false;
  if (head_.kind == FrameKind::ready) {
    if (!answering_->held || std::exchange(answering_->ready, true)) return false;
    ready_.push_back(answering_->id);
    return true;
  }
  return head_.kind == answer_to(answering_->kind) && head_.count == answering_->pieces.size() &&
         (!answering_->ready || answering_->permitted);
}

bool Link::tabled(std::vector<Request>& answered) {
  if (local_ && (head_.flags & kLocal) == 0 && !local_->none_came()) return false;
  if (head_.kind == FrameKind::read_answer) {
    const bool local = (head_.flags & kLocal) != 0;
    if (local && !local_) return false;
    if (!landing_.begin(head_, std::move(table_), answering_->pieces)) return false;
    if (local) return read_local(answered);
    part_ = Part::payload;
    if (landing_.done()) finish(answered);
    return true;
  }
  const bool good = head_.kind == FrameKind::write_answer ? take_writes(*answering_) : take_queries(*answering_);
  if (good) finish(answered);
  return good;
}

bool Link::take_writes(const Request& request) const {
  for (std::size_t n = 0; n < request.pieces.size(); ++n) {
    if (at<WriteAnswer>(table_, n).status > Status::invalid) return false;
  }
  for (std::size_t n = 0; n < request.pieces.size(); ++n) {
    const auto answer = at<WriteAnswer>(table_, n);
    Piece& piece = *request.pieces[n];
    piece.version = answer.version;
    piece.chunk_length = answer.length;
    piece.outcome = static_cast<Outcome>(answer.status);
  }
  return true;
}

bool Link::take_queries(const Request& request) const {
  for (std::size_t n = 0; n < request.pieces.size(); ++n) {
    const Piece& piece = *request.pieces[n];
    if (!sound_query_answer(at<QueryAnswer>(table_, n), piece.chunk.index, piece.stride)) return false;
  }
  for (std::size_t n = 0; n < request.pieces.size(); ++n) {
    const auto answer = at<QueryAnswer>(table_, n);
    Piece& piece = *request.pieces[n];
    const bool found = answer.status == Status::ok;
    piece.found = found ? answer.index : 0;
    piece.run = found ? answer.run : 0;
    piece.chunk_length = found ? answer.length : 0;
    piece.outcome = answer.status == Status::not_found ? Outcome::ok : static_cast<Outcome>(answer.status);
  }
  return true;
}

// Does one read from the socket into the places of the payload. Returns true if the payload is complete.
bool Link::land() {
  const auto places = landing_.places();
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(places.data());
  message.msg_iovlen = places.size();
  const ssize_t got = ::recvmsg(fd_, &message, MSG_DONTWAIT);
  if (got < 0 && errno == EINTR) return false;
  if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
    drained_ = true;
    return false;
  }
  if (got <= 0) {
    broken_ = true;
    return false;
  }
  landing_.landed(static_cast<std::size_t>(got));
  return landing_.done();
}

// Reads a local answer's bytes from the files. If more than kLocalTime has passed since the request, the node may have
// reused the extents meanwhile. Then the bytes do not count, and the pieces are `late`.
bool Link::read_local(std::vector<Request>& answered) {
  if (!local_->take(landing_)) return false;
  local_->read(landing_);
  answering_->local = true;
  if (Request::Clock::now() - answering_->posted > kLocalTime) {
    for (Piece* piece : answering_->pieces) piece->outcome = Outcome::late;
  }
  finish(answered);
  return true;
}

void Link::finish(std::vector<Request>& answered) {
  part_ = Part::head;
  if (answering_->kind == FrameKind::read) report(*answering_);
  answered.push_back(std::move(*answering_));
  outstanding_.erase(answering_);
}

// Reports to the server the chunks that it sent with wrong bytes.
void Link::report(const Request& request) {
  std::vector<Piece*> wrong;
  std::copy_if(request.pieces.begin(), request.pieces.end(), std::back_inserter(wrong),
               [](const Piece* piece) { return piece->outcome == Outcome::mismatch; });
  if (wrong.empty()) return;
  Head head;
  head.kind = FrameKind::report;
  head.count = static_cast<std::uint16_t>(wrong.size());
  send_frame(head, read_table(wrong), {});
}

// ---- Lanes -------------------------------------------------------------------------------------------------------

Lane::Lane() : wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (wake_ < 0) throw_errno("cannot create an eventfd");
}

Lane::~Lane() { ::close(wake_); }

void Lane::drop_busy() {
  std::erase_if(links, [](const auto& link) { return !link.second->idle(); });
}

}  // namespace ff::fs3::io
