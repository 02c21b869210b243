// The socket of one link of the UCX transport. It carries the receiver's address to the sender. The end of its stream
// shows either side that the other side has left or died. A side that leaves sends a last message: the number of messages
// that it has completed.
//
//   receiver -> sender   Handshake, the address of its UCX worker         when the link is made
//   both                 number of messages it completed on this link     when it leaves in an orderly way
//   both                 the end of the stream                            when it leaves or dies
//
// The sockets were authenticated before, unlike UCX's own connections. Only the two ends know the tag, so messages that
// other processes send to the worker are never taken for the peer's.
//
// Thread contract: one thread at a time.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace ff::hfreduce::ucx {

class LinkSocket {
 public:
  struct Handshake {
    std::uint64_t tag;
    std::string address;
  };
  enum class Side { sender, receiver };

  LinkSocket(Side side, int rank) : side_(side), rank_(rank) {}
  ~LinkSocket();
  LinkSocket(const LinkSocket&) = delete;
  LinkSocket& operator=(const LinkSocket&) = delete;

  // Owns the descriptor from the call on. REQUIRES: it is nonblocking, and guarded against forks. `handshake`: sent to
  // the other side; null on the sender's side.
  void open(int fd, const Handshake* handshake);
  int fd() const { return fd_; }
  bool wants_to_write() const { return !out_.empty(); }

  // Reads and writes as many bytes as possible. Throws Error(collective) if the other side violates the protocol.
  void advance();
  // True if the other side has closed the link or is dead, and all that it wrote has been read.
  bool ended() const { return ended_; }
  // Returns the receiver's handshake, once; on the sender's side.
  std::optional<Handshake> take_handshake();
  // Returns the number of messages the other side has completed; none until it has left in an orderly way.
  std::optional<std::uint64_t> promised() const { return promised_; }

  // Writes the link's last message: the number of completed messages. Never blocks.
  void send_leave(std::uint64_t done) noexcept;

 private:
  void read();
  void write();
  void parse();

  const Side side_;
  const int rank_;
  int fd_ = -1;
  bool ended_ = false, handshake_done_ = false;
  std::string in_, out_;
  std::optional<Handshake> handshake_;
  std::optional<std::uint64_t> promised_;
};

}  // namespace ff::hfreduce::ucx
