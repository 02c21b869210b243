// A disk in memory that may forget unsynced data, and lies or fails on demand. The same calls after the same seeds give
// the same answers.
//
// Thread contract: as Disk's; one mutex puts all calls in one order.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "fs3/store/disk/disk.hpp"

namespace ff::fs3::store {

enum class Fault : std::uint8_t { none, io, no_space };

class SimDisk final : public Disk {
 public:
  explicit SimDisk(std::uint64_t seed, std::uint64_t capacity = std::uint64_t{1} << 60);
  ~SimDisk() override;

  // Keeps all, none or some sectors of each unsynced change, at random; the same for changes of names. Closes all
  // handles and ends fail(). The store that used the disk must be destroyed or have failed.
  void power_cut(std::uint64_t seed);
  // Ends the process but not the machine: closes handles, ends fail(), keeps every byte, synced or not.
  void crash();
  // Loses one of the next few writes that a sync should make durable (old bytes stay), or writes it to a wrong place in
  // any file. The sync succeeds nevertheless. Readers see the actual bytes at once.
  void lie(std::uint64_t seed);
  // Makes `times` calls fail after `after` more calls (including reads). A failed write has done part of its work; a
  // failed sync has kept part of its data and loses the rest. Only calls that take space fail with ENOSPC. Fault::none
  // ends the failures.
  void fail(std::uint64_t after, Fault fault, std::uint64_t times = ~std::uint64_t{0});

  std::uint64_t calls() const { return calls_; }
  std::uint64_t lies_told() const { return lies_told_; }
  // Bytes used by the files with this prefix, in pages of 4096 bytes that are not empty.
  std::uint64_t used_bytes(const std::string& prefix = "");

  File open(const std::string& name, bool create) override;
  void close(File file) noexcept override;
  void write(File file, std::uint64_t offset, const void* from, std::size_t bytes) override;
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
  int descriptor(File) override { return -1; }

 private:
  static constexpr std::size_t kPage = 4096;
  using Page = std::array<unsigned char, kPage>;
  struct Image;   // sparse bytes and a size
  struct Change;  // a write, punch or truncate that no sync covered yet
  struct Inode;
  struct NameChange;

  Inode& inode(File file);
  void land_elsewhere(const Change& change);
  bool fails(bool takes_space);
  [[noreturn]] void raise(const char* call);
  std::uint64_t random();

  std::mutex mutex_;
  std::uint64_t state_;  // state of the random generator
  std::uint64_t capacity_;
  std::uint64_t calls_ = 0;
  Fault fault_ = Fault::none;
  std::uint64_t fail_after_ = 0, fail_times_ = 0;
  std::uint64_t lie_after_ = 0;  // 0: truthful; n: the n-th write from here that a sync covers is lost or misplaced
  std::uint64_t lies_told_ = 0;
  std::map<std::string, std::shared_ptr<Inode>> names_, durable_names_;
  std::vector<NameChange> name_changes_;
  std::vector<std::shared_ptr<Inode>> handles_;  // by File
};

}  // namespace ff::fs3::store
