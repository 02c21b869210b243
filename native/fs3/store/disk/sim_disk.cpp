#include "fs3/store/disk/sim_disk.hpp"

#include <algorithm>
#include <cstring>

#include "base/error.hpp"

namespace ff::fs3::store {
namespace {

std::uint64_t next(std::uint64_t& state) {  // splitmix64
  state += 0x9e3779b97f4a7c15ull;
  std::uint64_t z = state;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

}  // namespace

struct SimDisk::Image {
  std::unordered_map<std::uint64_t, std::unique_ptr<Page>> pages;  // an absent page is zeros
  std::uint64_t size = 0;

  // Calls visit(page number, offset in it, offset in the range, bytes) for the pieces of a range.
  template <class Visit>
  static void pieces(std::uint64_t offset, std::uint64_t bytes, const Visit& visit) {
    for (std::uint64_t done = 0; done < bytes;) {
      const std::uint64_t at = offset + done, n = std::min<std::uint64_t>(kPage - at % kPage, bytes - done);
      visit(at / kPage, static_cast<std::size_t>(at % kPage), static_cast<std::size_t>(done),
            static_cast<std::size_t>(n));
      done += n;
    }
  }
  void put(std::uint64_t offset, const unsigned char* from, std::size_t bytes) {
    pieces(offset, bytes, [&](std::uint64_t number, std::size_t in, std::size_t at, std::size_t n) {
      auto& page = pages[number];
      if (!page) page = std::make_unique<Page>(Page{});
      std::memcpy(page->data() + in, from + at, n);
    });
  }
  void get(std::uint64_t offset, unsigned char* to, std::size_t bytes) const {
    pieces(offset, bytes, [&](std::uint64_t number, std::size_t in, std::size_t at, std::size_t n) {
      const auto found = pages.find(number);
      if (found == pages.end()) std::memset(to + at, 0, n);
      else std::memcpy(to + at, found->second->data() + in, n);
    });
  }
  void zero(std::uint64_t offset, std::uint64_t bytes) {
    pieces(offset, bytes, [&](std::uint64_t number, std::size_t in, std::size_t, std::size_t n) {
      const auto found = pages.find(number);
      if (found == pages.end()) return;
      if (n == kPage) pages.erase(found);
      else std::memset(found->second->data() + in, 0, n);
    });
  }
  void cut(std::uint64_t to) {
    std::erase_if(pages, [&](const auto& page) { return page.first * kPage >= to; });
    if (to < size && to % kPage != 0) zero(to, kPage - to % kPage);
    size = to;
  }
  std::uint64_t new_pages(std::uint64_t offset, std::size_t bytes) const {
    std::uint64_t count = 0;
    pieces(offset, bytes,
           [&](std::uint64_t number, std::size_t, std::size_t, std::size_t) { count += !pages.contains(number); });
    return count;
  }
};

struct SimDisk::Change {
  enum class What : std::uint8_t { write, punch, truncate } what;
  std::uint64_t offset = 0, bytes = 0;  // changed range; for a write, whole sectors
  std::uint64_t size_after = 0;         // size of the file after the whole change
  std::vector<unsigned char> contents;  // bytes of the range after a write
};

struct SimDisk::Inode {
  Image cached, durable;
  std::vector<Change> changes;
  bool apart = false;  // after a failed sync or an unsynced truncate: any page of the two images may differ

  void keep(const Change& change) {
    switch (change.what) {
      case Change::What::write:
        durable.put(change.offset, change.contents.data(), change.contents.size());
        durable.size = std::max(durable.size, change.size_after);
        break;
      case Change::What::punch: durable.zero(change.offset, change.bytes); break;
      case Change::What::truncate: durable.cut(change.size_after); break;
    }
  }
  // Keeps all of a change, nothing, or some of its sectors.
  void keep_some(const Change& change, std::uint64_t& random) {
    const std::uint64_t choice = next(random) % 4;
    if (choice == 0) return;
    if (choice == 1 || change.what != Change::What::write) return keep(change);
    for (std::uint64_t at = 0; at < change.contents.size(); at += kSector) {
      if (next(random) & 1) continue;
      durable.put(change.offset + at, change.contents.data() + at, kSector);
      durable.size = std::max(durable.size, std::min(change.size_after, change.offset + at + kSector));
    }
  }
  void forget_unsynced() {
    if (apart) {
      cached.pages.clear();
      for (const auto& [number, page] : durable.pages) cached.pages[number] = std::make_unique<Page>(*page);
      apart = false;
    }
    for (const Change& change : changes)  // only touched pages can differ
      Image::pieces(change.offset, change.bytes,
                    [&](std::uint64_t number, std::size_t, std::size_t, std::size_t) { show(number); });
    cached.size = durable.size;
    changes.clear();
  }
  void show(std::uint64_t number) {  // makes the visible page equal to the durable one
    const auto found = durable.pages.find(number);
    if (found == durable.pages.end()) cached.pages.erase(number);
    else cached.pages[number] = std::make_unique<Page>(*found->second);
  }
};

struct SimDisk::NameChange {
  std::string from, to;          // created: `from` is empty; removed: `to` is empty
  std::shared_ptr<Inode> inode;  // what `to` names

  void apply(std::map<std::string, std::shared_ptr<Inode>>& names) const {
    if (!from.empty()) names.erase(from);
    if (!to.empty()) names[to] = inode;
  }
};

SimDisk::SimDisk(std::uint64_t seed, std::uint64_t capacity) : state_(seed), capacity_(capacity) {}
SimDisk::~SimDisk() = default;

std::uint64_t SimDisk::random() { return next(state_); }

SimDisk::Inode& SimDisk::inode(File file) {
  const auto at = static_cast<std::size_t>(file);
  if (file < 0 || at >= handles_.size() || !handles_[at]) throw Error(Code::storage, "not an open file");
  return *handles_[at];
}

bool SimDisk::fails(bool takes_space) {
  ++calls_;
  if (fault_ == Fault::none) return false;
  if (fail_after_ > 0) {
    --fail_after_;
    return false;
  }
  if (fail_times_ == 0 || (fault_ == Fault::no_space && !takes_space)) return false;
  --fail_times_;
  return true;
}

void SimDisk::raise(const char* call) { throw_errno(call, fault_ == Fault::no_space ? ENOSPC : EIO); }

void SimDisk::fail(std::uint64_t after, Fault fault, std::uint64_t times) {
  const std::lock_guard lock(mutex_);
  fault_ = fault;
  fail_after_ = after;
  fail_times_ = times;
}

void SimDisk::lie(std::uint64_t seed) {
  const std::lock_guard lock(mutex_);
  state_ ^= next(seed);
  lie_after_ = 1 + random() % 8;
}

void SimDisk::crash() {
  const std::lock_guard lock(mutex_);
  handles_.clear();
  fault_ = Fault::none;
}

void SimDisk::power_cut(std::uint64_t seed) {
  const std::lock_guard lock(mutex_);
  handles_.clear();
  fault_ = Fault::none;
  state_ ^= next(seed);
  const auto kept_by_chance = [this](Inode& file) {
    for (const Change& change : file.changes) file.keep_some(change, state_);
    file.forget_unsynced();
  };
  for (const auto& [name, file] : names_) kept_by_chance(*file);
  for (const auto& [name, file] : durable_names_)
    kept_by_chance(*file);  // removed files; all others have no changes left
  for (const NameChange& change : name_changes_)
    if (random() & 1) change.apply(durable_names_);
  name_changes_.clear();
  names_ = durable_names_;
}

std::uint64_t SimDisk::used_bytes(const std::string& prefix) {
  const std::lock_guard lock(mutex_);
  std::uint64_t pages = 0;
  for (const auto& [name, file] : names_)
    if (name.starts_with(prefix)) pages += file->cached.pages.size();
  return pages * kPage;
}

std::uint64_t SimDisk::free_bytes() {
  if (capacity_ >> 60 != 0) return capacity_;
  const std::uint64_t used = used_bytes();
  return used < capacity_ ? capacity_ - used : 0;
}

File SimDisk::open(const std::string& name, bool create) {
  const std::lock_guard lock(mutex_);
  const auto found = names_.find(name);
  const bool made = found == names_.end() && create;
  if (fails(made)) raise("open");
  if (found == names_.end() && !create) return kNoFile;
  std::shared_ptr<Inode> file = made ? std::make_shared<Inode>() : found->second;
  if (made) {
    names_[name] = file;
    name_changes_.push_back({"", name, file});
  }
  const auto free = std::find(handles_.begin(), handles_.end(), nullptr);
  if (free != handles_.end()) {
    *free = std::move(file);
    return static_cast<File>(free - handles_.begin());
  }
  handles_.push_back(std::move(file));
  return static_cast<File>(handles_.size() - 1);
}

void SimDisk::close(File file) noexcept {
  const std::lock_guard lock(mutex_);
  if (file >= 0 && static_cast<std::size_t>(file) < handles_.size()) handles_[static_cast<std::size_t>(file)] = nullptr;
}

void SimDisk::write(File file, std::uint64_t offset, const void* from, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  Inode& to = inode(file);
  const bool failing = fails(true);
  if (failing) bytes = static_cast<std::size_t>(random() % (bytes + 1));
  if (capacity_ >> 60 == 0) {
    std::uint64_t pages = to.cached.new_pages(offset, bytes);
    for (const auto& [name, other] : names_) pages += other->cached.pages.size();
    if (pages * kPage > capacity_) throw_errno("write", ENOSPC);
  }
  if (bytes > 0) {
    to.cached.put(offset, static_cast<const unsigned char*>(from), bytes);
    to.cached.size = std::max(to.cached.size, offset + bytes);
    const std::uint64_t first = offset / kSector * kSector, end = (offset + bytes + kSector - 1) / kSector * kSector;
    Change change{Change::What::write, first, end - first, to.cached.size, {}};
    change.contents.resize(static_cast<std::size_t>(end - first));
    to.cached.get(first, change.contents.data(), change.contents.size());
    to.changes.push_back(std::move(change));
  }
  if (failing) raise("write");
}

std::size_t SimDisk::read(File file, std::uint64_t offset, void* to, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const Inode& from = inode(file);
  if (fails(false)) raise("read");
  if (offset >= from.cached.size) return 0;
  bytes = static_cast<std::size_t>(std::min<std::uint64_t>(bytes, from.cached.size - offset));
  from.cached.get(offset, static_cast<unsigned char*>(to), bytes);
  return bytes;
}

std::uint64_t SimDisk::size(File file) {
  const std::lock_guard lock(mutex_);
  const Inode& from = inode(file);
  if (fails(false)) raise("size");
  return from.cached.size;
}

void SimDisk::truncate(File file, std::uint64_t size) {
  const std::lock_guard lock(mutex_);
  Inode& to = inode(file);
  if (fails(false)) raise("truncate");
  to.cached.cut(size);
  to.apart = true;
  to.changes.push_back({Change::What::truncate, 0, 0, size, {}});
}

void SimDisk::punch(File file, std::uint64_t offset, std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  Inode& to = inode(file);
  if (fails(false)) raise("punch");
  to.cached.zero(offset, bytes);
  to.changes.push_back({Change::What::punch, offset, bytes, to.cached.size, {}});
}

void SimDisk::sync(File file) {
  const std::lock_guard lock(mutex_);
  Inode& to = inode(file);
  if (fails(false)) {
    for (const Change& change : to.changes) to.keep_some(change, state_);
    to.changes.clear();
    to.apart = true;  // lost changes stay visible until the next power cut
    raise("sync");
  }
  std::vector<Change> changes = std::move(to.changes);
  to.changes.clear();
  const Change* lost = nullptr;
  for (const Change& change : changes) {
    if (change.what != Change::What::write || lie_after_ == 0 || --lie_after_ > 0) {
      to.keep(change);
      continue;
    }
    ++lies_told_;
    lost = &change;
    to.durable.size = std::max(to.durable.size, change.size_after);
    if (random() & 1) land_elsewhere(change);
  }
  if (lost == nullptr) return;
  Image::pieces(lost->offset, lost->bytes,
                [&](std::uint64_t number, std::size_t, std::size_t, std::size_t) { to.show(number); });
}

void SimDisk::land_elsewhere(const Change& change) {
  auto victim = names_.begin();
  std::advance(victim, static_cast<std::ptrdiff_t>(random() % names_.size()));
  Inode& file = *victim->second;
  const std::uint64_t offset = random() % (file.cached.size / kSector + 1) * kSector;
  for (Image* const image : {&file.durable, &file.cached}) {
    image->put(offset, change.contents.data(), change.contents.size());
    image->size = std::max(image->size, offset + change.contents.size());
  }
}

std::vector<std::string> SimDisk::list() {
  const std::lock_guard lock(mutex_);
  if (fails(false)) raise("list");
  std::vector<std::string> names;
  for (const auto& [name, file] : names_) names.push_back(name);
  return names;
}

void SimDisk::remove(const std::string& name) {
  const std::lock_guard lock(mutex_);
  if (fails(false)) raise("remove");
  if (names_.erase(name) > 0) name_changes_.push_back({name, "", nullptr});
}

void SimDisk::rename(const std::string& from, const std::string& to) {
  const std::lock_guard lock(mutex_);
  if (fails(false)) raise("rename");
  const auto found = names_.find(from);
  if (found == names_.end()) throw_errno("rename " + from, ENOENT);
  const NameChange change{from, to, found->second};
  change.apply(names_);
  name_changes_.push_back(change);
}

void SimDisk::sync_names() {
  const std::lock_guard lock(mutex_);
  if (fails(false)) raise("sync_names");
  for (const NameChange& change : name_changes_) change.apply(durable_names_);
  name_changes_.clear();
}

}  // namespace ff::fs3::store
