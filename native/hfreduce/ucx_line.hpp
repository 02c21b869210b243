// The socket of one link of the UCX transport: it tells the sender where to send to, and both sides
// whether the other is alive and, when it leaves, how far it has come.
//
//   receiver -> sender   Greeting, the address of its UCX worker          when the link is made
//   both                 how many messages it has done on this link       when it leaves in peace
//   both                 the end of the stream                            when it leaves or dies
//
// The sockets were authenticated before, which UCX's own connections never are: the tag, which
// nobody else knows, keeps what others may send to the worker from being taken for a message.
//
// Thread contract: one thread at a time.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace ff::hfreduce::ucx {

class Line {
 public:
  struct Greeting {
    std::uint64_t tag;
    std::string address;
  };
  enum class Side { sender, receiver };

  Line(Side side, int rank) : side_(side), rank_(rank) {}
  ~Line();
  Line(const Line&) = delete;
  Line& operator=(const Line&) = delete;

  // Owns the descriptor from the call on; it does not block and is guarded against forks.
  // `greeting`: the receiver's.
  void open(int fd, const Greeting* greeting);
  int fd() const { return fd_; }
  bool wants_to_write() const { return !out_.empty(); }

  // Reads and writes what can be. Throws Error(collective) if the other side speaks otherwise.
  void advance();
  // The other side has closed the link or is dead; all that it wrote has been read.
  bool ended() const { return ended_; }
  // Of the receiver, once; on the sender's side.
  std::optional<Greeting> take_greeting();
  // How many messages the other side has done; none before it has left in peace.
  std::optional<std::uint64_t> promised() const { return promised_; }

  // The last thing that is written. Never blocks.
  void say_goodbye(std::uint64_t done) noexcept;

 private:
  void read();
  void write();
  void parse();

  const Side side_;
  const int rank_;
  int fd_ = -1;
  bool ended_ = false, greeted_ = false;
  std::string in_, out_;
  std::optional<Greeting> greeting_;
  std::optional<std::uint64_t> promised_;
};

}  // namespace ff::hfreduce::ucx
