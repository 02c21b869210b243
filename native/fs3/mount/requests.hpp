// Requests of the kernel to a mount, and the answers: the interface between libfuse and the file system.
//
// Thread contract: a Handler is called from all threads of a session at once. FileState: any thread.
// The kernel's inode numbers are those of fs3, so no table of inodes is kept and FORGET has nothing to do.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fs3/client/batch.hpp"

namespace ff::fs3::mount {

inline constexpr std::int64_t kClean = -1;

// Inode that programs have open, shared by all of its open files on one mount.
//
// Invariants
//   - No byte at or beyond `end` is read; `end` is at least the end of every write that has returned.
//   - `written` is the largest end written since it was last taken, or kClean.
//   - Only shared pointers own it. Python's object holds one of them; the last shared pointer may be destroyed without
//     the GIL.
//   - No chunk at or beyond byte `widened` is written. A write increments `writers` before it reads `widened`. So after
//     a thread has set `widened` to 0 and seen no writers, each later write must first ask for a new limit ("widen").
struct FileState : std::enable_shared_from_this<FileState> {
  FileState(std::uint64_t number, client::FileMap chunks, std::int64_t length)
      : inode(number), map(std::move(chunks)), end(length) {}

  const std::uint64_t inode;
  const client::FileMap map;
  std::atomic<std::int64_t> end;
  std::atomic<std::int64_t> widened = 0;
  std::atomic<int> writers = 0;
  std::atomic<std::int64_t> written = kClean;
  std::atomic<std::int64_t> written_ns = 0;  // time of the last write

  void reach(std::int64_t to) { raise(end, to); }
  void wrote(std::int64_t to) {
    raise(end, to);
    raise(written, to);
    timespec now = {};
    clock_gettime(CLOCK_REALTIME, &now);
    written_ns = std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
  }

 private:
  static void raise(std::atomic<std::int64_t>& value, std::int64_t to) {
    for (std::int64_t now = value; now < to && !value.compare_exchange_weak(now, to);) {
    }
  }
};

struct Attributes {
  std::uint64_t inode = 0;
  std::uint32_t mode = 0, nlink = 0, uid = 0, gid = 0;
  std::int64_t size = 0, atime = 0, mtime = 0, ctime = 0;  // size: bytes; times: ns
  std::uint32_t block = 0, device = 0;
  double age_s = 0;  // seconds since the metadata service sent these attributes
};

struct Entry {
  std::string name;
  Attributes attributes;
};

// A call for names, attributes or open files. Fields that a call does not need are zero or empty.
struct Request {
  const char* op = "";  // the kernel's name: "lookup", "setattr", ...
  std::uint64_t inode = 0, other = 0;
  std::string name = {}, data = {};  // `data`: a second name, a symlink's target or an attribute's value
  std::uint32_t flags = 0;           // open, rename, xattr or fallocate flags; setattr: which fields are valid
  std::uint32_t mode = 0;
  std::int64_t offset = 0, size = 0;
  std::int64_t uid = -1, gid = -1;    // new owners for chown; -1: unchanged
  std::int64_t atime = 0, mtime = 0;  // ns
  std::uint32_t caller_uid = 0, caller_gid = 0;
  std::int32_t caller_pid = 0;  // thread that called; 0: the kernel itself, or a thread of another PID namespace
};

struct Answer {
  int error = 0;  // errno, or 0
  Attributes attributes = {};
  std::string bytes = {};
  std::vector<Entry> entries = {};
  std::shared_ptr<FileState> file = {};
  bool keep = false;                              // open: the kernel's pages of the file are still valid
  std::uint64_t blocks = 0, free = 0, files = 0;  // statfs; `blocks` and `free` in units of `attributes.block`
};

class Handler {
 public:
  static constexpr std::size_t kPage = 1024;  // entries of a "readdir" answer; the directory's last answer has fewer

  virtual ~Handler() = default;
  virtual Answer call(const Request& request) noexcept = 0;
  // Each returns a number of bytes, or a negative errno. `caller_pid` as in a Request.
  virtual std::int64_t read(FileState& file, std::int64_t offset, std::span<std::byte> memory,
                            std::int32_t caller_pid) noexcept = 0;
  virtual std::int64_t write(FileState& file, std::int64_t offset, std::span<const std::byte> bytes,
                             std::int32_t caller_pid) noexcept = 0;
};

struct Options {
  double attributes_s = 1;  // time for which the kernel may cache attributes and names
  bool others = false;      // allow other users
  std::string source = {};  // name of the file system in /proc/mounts
};

// A mounted directory.
class Session {
 public:
  virtual ~Session() = default;      // unmounts; REQUIRES: no thread is in `work`
  virtual void work() noexcept = 0;  // answers requests until the directory is unmounted or `stop` was called
  virtual void stop() noexcept = 0;
};

}  // namespace ff::fs3::mount
