// Reads by a client from a node on its own machine. The node names files and places in them (shared_files.hpp). The
// client reads from the page cache straight into the caller's memory and compares each block with its CRC32C.
//
// Thread contract: one thread at a time. `read` waits for the disk if it must.
// Invariant: once a frame is taken, the descriptors that came with it are in slots or closed.
#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "fs3/io/client/read_placement.hpp"
#include "fs3/io/wire/wire.hpp"

namespace ff::fs3::io {

class LocalFiles {
 public:
  LocalFiles() { slots_.fill(-1); }
  ~LocalFiles();
  LocalFiles(const LocalFiles&) = delete;
  LocalFiles& operator=(const LocalFiles&) = delete;

  static bool possible(int socket);  // true if the socket connects processes of one machine

  // Like recv with MSG_DONTWAIT; keeps the received descriptors.
  ssize_t receive(int socket, std::byte* to, std::size_t bytes);
  // For a frame that is no local answer: returns false if descriptors came with the frame.
  bool none_came() const { return came_.empty(); }
  // Puts the received descriptors into the slots that a local answer's places name. Returns false if there are too few
  // or too many descriptors.
  bool take(const ReadPlacement& landing);
  // Reads all bytes of the answer, large pieces by several cores. Unreadable bytes become zeros, which the CRCs reveal.
  void read(ReadPlacement& landing);

  bool overflown() const { return overflown_; }  // descriptors were lost, because this process has too many open
  std::uint32_t done() const { return done_; }   // number of answers read

 private:
  void read_part(ReadPlacement& landing);  // from any thread
  std::size_t read_some(int file, std::span<const iovec> parts, std::uint64_t position);
  void advise(const ReadPlacement& landing) const;

  std::array<int, kLocalSlots> slots_;
  std::vector<int> came_;
  bool overflown_ = false;
  std::atomic<bool> tries_cache_ = true;  // false once a file system cannot tell what is not in the page cache
  std::uint32_t done_ = 0;
};

}  // namespace ff::fs3::io
