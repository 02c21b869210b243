// How a client reads the chunks of a node on its own machine: the node names files and places (sharing.hpp), the client
// reads from the page cache straight into the caller's memory and compares each block with its CRC32C.
//
// Thread contract: one thread at a time. `read` waits for the disk where it must.
// Invariant: what the other side sent with a frame is in a slot when the frame was taken, or closed.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "fs3/io/landing.hpp"
#include "fs3/io/wire.hpp"

namespace ff::fs3::io {

class LocalFiles {
 public:
  LocalFiles() { slots_.fill(-1); }
  ~LocalFiles();
  LocalFiles(const LocalFiles&) = delete;
  LocalFiles& operator=(const LocalFiles&) = delete;

  static bool possible(int socket);  // between processes of one machine

  // As recv with MSG_DONTWAIT; keeps the descriptors that come.
  ssize_t receive(int socket, std::byte* to, std::size_t bytes);
  // A frame that is no local answer; false: descriptors came with it.
  bool none_came() const { return came_.empty(); }
  // Puts what came where a local answer's places say. False: not as many as they name.
  bool take(const Landing& landing);
  // All bytes of the answer. What cannot be read is zeros; the CRCs tell.
  void read(Landing& landing);

  bool overflown() const { return overflown_; }  // descriptors were lost: this process has too many open
  std::uint32_t done() const { return done_; }   // answers that were read

 private:
  std::size_t read_some(int file, std::span<const iovec> parts, std::uint64_t position);
  void advise(const Landing& landing) const;

  std::array<int, kLocalSlots> slots_;
  std::vector<int> came_;
  bool overflown_ = false;
  bool tries_cache_ = true;  // the file systems tell what is not in the page cache
  std::uint32_t done_ = 0;
};

}  // namespace ff::fs3::io
