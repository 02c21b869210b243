// Changes to a store while its snapshot is written survive a crash, whether or not the snapshot saw them.
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/testing/check.hpp"
#include "fs3/store/disk/sim_disk.hpp"
#include "fs3/store/store.hpp"

namespace ff::fs3::store {
namespace {

constexpr Identity kIdentity{1, 2};
constexpr Options kOptions{.reserve_bytes = 0};

// A SimDisk that runs an action once during a snapshot: after the head of the new index is written and the tags are
// copied, before any entry is copied.
class BusyDisk final : public Disk {
 public:
  explicit BusyDisk(SimDisk& disk) : disk_(disk) {}
  std::function<void()> meanwhile;

  File open(const std::string& name, bool create) override {
    const File file = disk_.open(name, create);
    if (name == "index-new") index_ = file, writes_ = 0;
    return file;
  }
  void write(File file, std::uint64_t offset, const void* from, std::size_t bytes) override {
    constexpr int kTags = 2;  // the second block
    if (file == index_ && ++writes_ == kTags && meanwhile) std::exchange(meanwhile, nullptr)();
    disk_.write(file, offset, from, bytes);
  }
  void close(File file) noexcept override { disk_.close(file); }
  std::size_t read(File file, std::uint64_t offset, void* to, std::size_t bytes) override {
    return disk_.read(file, offset, to, bytes);
  }
  std::uint64_t size(File file) override { return disk_.size(file); }
  void truncate(File file, std::uint64_t size) override { disk_.truncate(file, size); }
  void punch(File file, std::uint64_t offset, std::uint64_t bytes) override { disk_.punch(file, offset, bytes); }
  void sync(File file) override { disk_.sync(file); }
  std::vector<std::string> list() override { return disk_.list(); }
  void remove(const std::string& name) override { disk_.remove(name); }
  void rename(const std::string& from, const std::string& to) override { disk_.rename(from, to); }
  void sync_names() override { disk_.sync_names(); }
  std::uint64_t free_bytes() override { return disk_.free_bytes(); }
  int descriptor(File file) override { return disk_.descriptor(file); }

 private:
  SimDisk& disk_;
  File index_ = kNoFile;
  int writes_ = 0;
};

// A snapshot copies the tags before the entries. A version that is dropped in between is pending neither in the
// snapshot nor in the log, and its tag must not come back either.
void a_drop_takes_its_tag_with_it() {
  constexpr ChunkId kChunk{1, 0};
  constexpr Tag kTag{7, 1, 1};
  const std::vector<std::byte> bytes(100);
  SimDisk disk(1);
  BusyDisk busy(disk);
  {
    Store store = Store::open(busy, kIdentity, kOptions);
    CHECK(store.apply(1, {.chunk = kChunk, .version = 1, .kind = Kind::write, .bytes = bytes, .tag = kTag}) ==
          Status::ok);
    CHECK(store.sync().at(0).status == Status::ok && store.tag(7, 1)->version == 1);
    busy.meanwhile = [&] {
      CHECK(store.drop(kChunk, 1) == Status::ok);
      CHECK(store.sync().empty() && store.synced() && store.tag(7, 1)->version == 0);
    };
    CHECK(store.snapshot() == Status::ok && !busy.meanwhile);
  }
  disk.crash();
  const Store store = Store::open(disk, kIdentity, kOptions);
  CHECK(store.entry(kChunk).pending.version == 0 && store.entry(kChunk).committed.version == 0);
  CHECK(store.tag(7, 1)->version == 0);  // its client may retry that write
}

// A store that was repaired from copies asks for a snapshot once. Each try begins a log, which would fill a full disk.
void a_full_disk_is_tried_once() {
  SimDisk disk(1);
  {
    Store store = Store::open(disk, kIdentity, kOptions);
    store.raise_floor(5);
    store.sync();
  }
  const File log = disk.open("log-000000000000", false);
  disk.write(log, 64 + 20, "x", 1);  // damages the second record
  disk.close(log);
  Store store = Store::open(disk, kIdentity, kOptions);
  CHECK(store.floor() == 5 && store.statistics().mended == 1 && store.snapshot_due());
  disk.fail(0, Fault::no_space);
  CHECK(store.snapshot() == Status::no_space && !store.snapshot_due());
  disk.fail(0, Fault::none);
  CHECK(store.snapshot() == Status::ok && store.floor() == 5);
}

}  // namespace
}  // namespace ff::fs3::store

int main() {
  ff::fs3::store::a_drop_takes_its_tag_with_it();
  ff::fs3::store::a_full_disk_is_tried_once();
}
