// A directory of a real file system: pwrite and pread, fdatasync. A File is its descriptor.
//
// Large page-aligned writes bypass the page cache (O_DIRECT) if the file system supports that. Such a write saves a
// copy, leaves no bytes for the sync to write, and does not evict bytes that are read often.
// Holds an exclusive lock (flock) on the directory from construction to destruction: one store per directory.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <span>
#include <string>

#include "fs3/store/disk/disk.hpp"

namespace ff::fs3::store {

class DirectoryDisk final : public Disk {
 public:
  explicit DirectoryDisk(const std::string& path);  // creates the directory if it is missing
  ~DirectoryDisk() override;
  DirectoryDisk(const DirectoryDisk&) = delete;
  DirectoryDisk& operator=(const DirectoryDisk&) = delete;

  File open(const std::string& name, bool create) override;
  void close(File file) noexcept override;
  void write(File file, std::uint64_t offset, const void* from, std::size_t bytes) override;
  void write_parts(File file, std::uint64_t offset, std::span<const std::span<const std::byte>> parts) override;
  std::size_t read(File file, std::uint64_t offset, void* to, std::size_t bytes) override;
  std::uint64_t size(File file) override;
  void truncate(File file, std::uint64_t size) override;
  void punch(File file, std::uint64_t offset, std::uint64_t bytes) override;
  void sync(File file) override;
  std::vector<std::string> list() override;
  void remove(const std::string& name) override;
  void rename(const std::string& from, const std::string& to) override;
  void sync_names() override;
  std::uint64_t free_bytes() override;
  int descriptor(File file) override { return file; }

 private:
  bool write_direct(File file, std::uint64_t offset, std::span<iovec> parts);

  std::string path_;
  int directory_;
  std::atomic<bool> direct_ = true;  // false once a direct write was refused
};

}  // namespace ff::fs3::store
