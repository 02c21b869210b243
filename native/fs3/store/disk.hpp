// What a chunk store stands on: the files of one directory. DirectoryDisk is the real one, SimDisk one that forgets.
//
// Thread contract: every call from any thread. Reads and writes of disjoint bytes of one file run at once; what a
// write and a read of the same bytes at the same time see is unspecified.
// Durability: a write, truncate or punch is durable once a sync of its file returns that began after it; a
// created, renamed or removed name once a sync_names returns that began after it. Before that, a power cut keeps any
// part of them, in whole sectors of kSector bytes. A sync that failed may have lost what it was asked to keep, for ever:
// its caller must not go on as if a later sync made up for it.
// Errors are ff::Error: no_space (ENOSPC, EDQUOT) or storage; a call that failed may have done part of its work.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace ff::fs3::store {

inline constexpr std::size_t kSector = 512;  // what a power cut leaves whole

using File = int;
inline constexpr File kNoFile = -1;

class Disk {
 public:
  virtual ~Disk() = default;

  // kNoFile if there is none and `create` is false. Open until close(); opening twice gives two handles.
  virtual File open(const std::string& name, bool create) = 0;
  virtual void close(File file) noexcept = 0;
  virtual void write(File file, std::uint64_t offset, const void* from, std::size_t bytes) = 0;
  // The parts one behind the other: as so many writes, but perhaps in one.
  virtual void write_parts(File file, std::uint64_t offset, std::span<const std::span<const std::byte>> parts) {
    for (const auto& part : parts) {
      write(file, offset, part.data(), part.size());
      offset += part.size();
    }
  }
  // Bytes read: fewer than asked only at the end of the file. Holes read as zeros.
  virtual std::size_t read(File file, std::uint64_t offset, void* to, std::size_t bytes) = 0;
  virtual std::uint64_t size(File file) = 0;
  virtual void truncate(File file, std::uint64_t size) = 0;
  // The bytes read as zeros afterwards and take no space where the disk can do that; the size stays.
  virtual void punch(File file, std::uint64_t offset, std::uint64_t bytes) = 0;
  virtual void sync(File file) = 0;

  virtual std::vector<std::string> list() = 0;  // sorted
  virtual void remove(const std::string& name) = 0;  // its open handles stay good; no such name: nothing
  virtual void rename(const std::string& from, const std::string& to) = 0;  // atomic; replaces `to`
  virtual void sync_names() = 0;

  virtual std::uint64_t free_bytes() = 0;
  // A file descriptor for sendfile and the like, which stays the disk's; -1 where there is none.
  virtual int descriptor(File file) = 0;
};

}  // namespace ff::fs3::store
