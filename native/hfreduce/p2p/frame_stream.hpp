// Frames of point-to-point messages (drawn in p2p_engine.hpp) and the nonblocking socket that carries them.
//
// Thread contract: not thread-safe; P2PEngine's lock guards everything here.
#pragma once

#include <sys/socket.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/error.hpp"

namespace ff::hfreduce::mail {

inline constexpr std::size_t kEagerBytes = 64u << 10;  // larger messages are announced first
inline constexpr std::size_t kWindow = 8u << 20;       // limit of one sender's eager bytes that wait at one receiver
inline constexpr std::size_t kRecordBytes = 128;       // added per message, so that kWindow also bounds empty messages
inline constexpr std::size_t kAnnounced = 1u << 16;    // limit of one sender's unanswered announcements at a receiver
inline constexpr std::size_t kChunk = 1u << 20;        // bytes of a long payload sent before other messages may pass
inline constexpr std::size_t kSlice = 1u << 20;        // bytes moved on one link before other links get their turn

enum class Kind : std::uint32_t {
  // dialler -> acceptor
  eager = 1,  // the payload follows
  request,    // announces `bytes`
  data,       // `bytes` more of the payload of message `id` follow
  cancel,     // message `id` will not be sent, or not completely
  offer,      // announces `bytes` that lie in shared memory; an Offer follows (shared_offers.hpp)
  // acceptor -> dialler
  clear,   // message `id` may be sent
  refuse,  // message `id` matched a receive of `bytes`, a different size
  credit,  // eager messages of `bytes` in total were received
  done,    // message `id` was copied
};

struct Header {
  static constexpr std::uint32_t kMagic = 0x31504646;  // "FFP1"

  std::uint32_t magic = kMagic;
  Kind kind{};
  std::uint64_t tag = 0, id = 0, bytes = 0;
};
static_assert(sizeof(Header) == 32 && std::endian::native == std::endian::little);

// Error for a peer that violated the protocol. Both directions of the link end.
class Malformed : public Error {
 public:
  Malformed(int peer, const std::string& what)
      : Error(Code::rank_failed, "rank " + std::to_string(peer) + " sent a malformed message: " + what, peer) {}
};

// Nonblocking socket of a link; owns its descriptor. Throws Error(rank_failed, peer) if the peer has gone.
class Stream {
 public:
  explicit Stream(int peer) : peer_(peer) {}
  ~Stream() { close(); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  void attach(int fd);
  void close();
  int release();  // gives the descriptor to the caller
  int fd() const { return fd_; }
  bool tcp() const { return tcp_; }
  bool open() const { return fd_ >= 0; }

  struct Read {
    std::size_t bytes = 0, direct = 0;  // bytes read (0: none available now); of these, bytes in the target
    bool full = false;                  // more bytes may be available
  };
  // Makes one system call: fills `target` first, puts further bytes into the buffer. REQUIRES: `wanted` is 0, or
  // nothing is buffered.
  Read read(char* target, std::size_t wanted);
  // Takes buffered bytes, at most those available; nullptr drops them.
  std::size_t take(char* target, std::size_t wanted);
  bool next(Header& header);  // takes a header if a complete one is buffered
  std::size_t buffered() const { return end_ - begin_; }

  // Returns the descriptors that came with the bytes so far; the caller owns them.
  std::vector<int> take_descriptors(std::size_t count);

  // Makes one system call. Returns the bytes sent, 0 if none can be sent now; descriptors go with the first byte.
  std::size_t write(const char* head, std::size_t head_bytes, const char* body, std::size_t body_bytes,
                    const std::vector<int>& descriptors = {});

 private:
  static constexpr std::size_t kBuffer = 16u << 10;
  static constexpr std::size_t kDescriptors = 8;  // maximum per sendmsg(), and maximum received but not yet taken

  void keep_descriptors(msghdr& message);

  const int peer_;
  int fd_ = -1;
  bool tcp_ = false;
  std::unique_ptr<char[]> buffer_;
  std::size_t begin_ = 0, end_ = 0;
  std::vector<int> descriptors_;
};

// Returns the error "rank R died or left the group".
Error gone(int rank);

}  // namespace ff::hfreduce::mail
