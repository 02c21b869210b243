// Storage interface of a chunk store: the files of one directory. DirectoryDisk is the real one, SimDisk simulates
// loss.
//
// Thread contract: every call from any thread. Reads and writes of disjoint bytes of one file run concurrently. The
// result of a concurrent write and read of the same bytes is unspecified.
// Durability: a write, truncate or punch becomes durable when a sync of the file returns that began after the change. A
// created, renamed or removed name becomes durable when a sync_names returns that began after the change. Before that,
// a power cut keeps any part of these changes, in whole sectors of kSector bytes. A failed sync may have lost its data
// for ever: the caller must not assume that a later sync writes the data.
// Errors are ff::Error: no_space (ENOSPC, EDQUOT) or storage; a failed call may have done part of its work.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace ff::fs3::store {

inline constexpr std::size_t kSector = 512;  // unit that a power cut keeps or loses as a whole

using File = int;
inline constexpr File kNoFile = -1;

class Disk {
 public:
  virtual ~Disk() = default;

  // Returns kNoFile if the file is missing and `create` is false. Open until close(); opening twice gives two handles.
  virtual File open(const std::string& name, bool create) = 0;
  virtual void close(File file) noexcept = 0;
  virtual void write(File file, std::uint64_t offset, const void* from, std::size_t bytes) = 0;
  // Writes the parts one after the other: like one write each, but possibly in one call.
  virtual void write_parts(File file, std::uint64_t offset, std::span<const std::span<const std::byte>> parts) {
    for (const auto& part : parts) {
      write(file, offset, part.data(), part.size());
      offset += part.size();
    }
  }
  // Returns the bytes read: fewer than asked only at the end of the file. Holes read as zeros.
  virtual std::size_t read(File file, std::uint64_t offset, void* to, std::size_t bytes) = 0;
  virtual std::uint64_t size(File file) = 0;
  virtual void truncate(File file, std::uint64_t size) = 0;
  // Makes the bytes read as zeros and, if the disk supports that, frees their space. The size stays.
  virtual void punch(File file, std::uint64_t offset, std::uint64_t bytes) = 0;
  virtual void sync(File file) = 0;

  virtual std::vector<std::string> list() = 0;       // sorted
  virtual void remove(const std::string& name) = 0;  // open handles stay valid; a missing name is ignored
  virtual void rename(const std::string& from, const std::string& to) = 0;  // atomic; replaces `to`
  virtual void sync_names() = 0;

  virtual std::uint64_t free_bytes() = 0;
  // Returns a file descriptor for sendfile and the like, still owned by the disk; -1 if there is none.
  virtual int descriptor(File file) = 0;
};

}  // namespace ff::fs3::store
