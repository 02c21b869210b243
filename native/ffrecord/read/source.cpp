#include "ffrecord/read/source.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <new>

#include "base/crc/crc32.hpp"
#include "base/error.hpp"
#include "base/io/uring.hpp"

namespace ff::ffrecord {
namespace {

constexpr std::size_t kSystemPage = 4096;
constexpr int kWrong = 4;  // wrong answers of mincore after which the kernel counts as hiding the page cache
// Magic numbers of statfs: 9P, AFS, BeeGFS, Ceph, CIFS, FUSE, GPFS, Lustre, NFS, SMB and SMB2.
constexpr std::array<std::uint32_t, 11> kRemoteFileSystems = {0x01021997, 0x5346414f, 0x19830326, 0x00c36400,
                                                              0xff534d42, 0x65735546, 0x47504653, 0x0bd00bd0,
                                                              0x6969,     0x517b,     0xfe534d42};

}  // namespace

const Calls& kernel() {
  static const Calls calls{[](int fd, const iovec* parts, int count, std::int64_t offset, int flags) -> long {
                             const long got = ::preadv2(fd, parts, count, offset, flags);
                             return got < 0 ? -errno : got;
                           },
                           [](int fd) {
                             // Opens by the descriptor, because the path may lead to another file by now.
                             const int found = ::open(("/proc/self/fd/" + std::to_string(fd)).c_str(),
                                                      O_RDONLY | O_CLOEXEC | O_DIRECT);
                             return found < 0 ? -errno : found;
                           },
                           [](unsigned entries) { return uring::make(entries); },
                           [](const void* start, std::size_t bytes, unsigned char* present) {
                             return ::mincore(const_cast<void*>(start), bytes, present) < 0 ? -errno : 0;
                           },
                           [](int fd, std::int64_t offset, std::int64_t bytes) {
                             static_cast<void>(::posix_fadvise(fd, offset, bytes, POSIX_FADV_WILLNEED));  // a hint
                           },
                           [] {
                             struct rusage usage;
                             return ::getrusage(RUSAGE_THREAD, &usage) == 0 ? usage.ru_majflt : 0;
                           },
                           [](int fd, struct statfs* found) { return ::fstatfs(fd, found) < 0 ? -errno : 0; }};
  return calls;
}

MappedFile::MappedFile(const RecordFile& file) : size_(static_cast<std::size_t>(file.size())) {
  const std::size_t words = (static_cast<std::size_t>(file.count()) + 63) / 64 + 1;
  void* const bits = ::mmap(nullptr, words * 8, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (bits == MAP_FAILED) throw_errno("cannot map the marks of record file '" + file.path() + "'");
  words_ = static_cast<std::uint64_t*>(bits);
  void* const at = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, file.fd(), 0);
  if (at == MAP_FAILED) {
    const int error = errno;
    ::munmap(words_, words * 8);
    throw_errno("cannot map record file '" + file.path() + "'", error);
  }
  data_ = static_cast<const std::uint8_t*>(at);
  marks_ = words * 8;
}

MappedFile::~MappedFile() {
  ::munmap(const_cast<std::uint8_t*>(data_), size_);
  ::munmap(words_, marks_);
}

bool MappedFile::verified(std::int64_t sample) const {
  const auto i = static_cast<std::size_t>(sample);
  return (std::atomic_ref(words_[i / 64]).load(std::memory_order_relaxed) >> (i % 64) & 1) != 0;
}

void MappedFile::set_verified(std::int64_t sample) const {
  const auto i = static_cast<std::size_t>(sample);
  std::atomic_ref(words_[i / 64]).fetch_or(std::uint64_t{1} << (i % 64), std::memory_order_relaxed);
}

bool MappedFile::resident(std::int64_t offset, std::int64_t bytes, const Calls& calls) const {
  constexpr std::size_t kPages = 512;
  unsigned char present[kPages];
  std::size_t at = static_cast<std::size_t>(offset) / kSystemPage * kSystemPage;
  const auto end = static_cast<std::size_t>(offset + bytes);
  for (; at < end; at += kPages * kSystemPage) {
    const std::size_t length = std::min(end - at, kPages * kSystemPage);
    if (calls.mincore(data_ + at, length, present) != 0) return false;
    const std::size_t pages = (length + kSystemPage - 1) / kSystemPage;
    if (!std::all_of(present, present + pages, [](unsigned char page) { return (page & 1) != 0; })) return false;
  }
  return true;
}

Source::~Source() {
  if (direct_ >= 0) ::close(direct_);
  delete mapping_.load();
}

std::int64_t Source::read(iovec* parts, int count, std::int64_t offset, bool wait) {
  std::int64_t total = 0;
  for (;;) {
    while (count > 0 && parts->iov_len == 0) ++parts, --count;
    if (count == 0) return total;
    const int flags = wait || waits_.load(std::memory_order_relaxed) ? 0 : RWF_NOWAIT;
    const long got = calls_.preadv2(file_.fd(), parts, count, offset + total, flags);
    if (got == -EINTR) continue;
    if (flags != 0 && got == -EAGAIN) return total;
    if (flags != 0 && (got == -EOPNOTSUPP || got == -ENOSYS)) {
      waits_ = true;
      continue;
    }
    if (got < 0)
      throw_errno("cannot read record file '" + file_.path() + "' at byte " + std::to_string(offset + total),
                  static_cast<int>(-got));
    if (got == 0) ends_at(offset + total);
    total += got;
    for (auto left = static_cast<std::size_t>(got); left > 0;) {
      const std::size_t step = std::min(left, parts->iov_len);
      parts->iov_base = static_cast<char*>(parts->iov_base) + step;
      parts->iov_len -= step;
      left -= step;
      if (parts->iov_len == 0) ++parts, --count;
    }
  }
}

void Source::check(std::int64_t sample, const Extent& extent, const void* data) const {
  compare(sample, extent, crc32(0, data, static_cast<std::size_t>(extent.bytes)));
}

void Source::compare(std::int64_t sample, const Extent& extent, std::uint32_t found) const {
  file_.compare(sample, extent, found);
}

void Source::check_size() const {
  struct stat status;
  if (::fstat(file_.fd(), &status) != 0) throw_errno("cannot stat record file '" + file_.path() + "'");
  if (status.st_size < file_.size()) ends_at(status.st_size);
}

void Source::ends_at(std::int64_t offset) const { file_.ends_at(offset); }

int Source::direct() {
  if (refused_) return -1;
  int found = direct_;
  if (found >= 0) return found;
  const int fresh = calls_.open_direct(file_.fd());
  if (fresh < 0) {
    refused_ = true;
    return -1;
  }
  if (direct_.compare_exchange_strong(found, fresh)) return fresh;
  ::close(fresh);
  return found;
}

bool Source::resident(std::int64_t offset, std::int64_t bytes) {
  const MappedFile* const mapped = try_mapping();
  if (mapped == nullptr) {
    blind = true;
    return true;
  }
  const bool found = mapped->resident(offset, bytes, calls_);
  if (!found) told_no_ = true;
  return found;
}

void Source::missed(bool asked) {
  seen = Seen::gaps;
  if (asked && !told_no_ && ++wrong_ >= kWrong) blind = true;
}

const std::shared_ptr<const MappedFile>& Source::mapping() {
  const auto* found = mapping_.load(std::memory_order_acquire);
  if (found != nullptr) return *found;
  auto fresh = std::make_unique<const std::shared_ptr<const MappedFile>>(std::make_shared<const MappedFile>(file_));
  if (mapping_.compare_exchange_strong(found, fresh.get(), std::memory_order_acq_rel)) return *fresh.release();
  return *found;
}

bool Source::remote() {
  if (remote_ < 0) {
    struct statfs found{};
    const bool known = calls_.fstatfs(file_.fd(), &found) == 0;
    const auto type = static_cast<std::uint32_t>(found.f_type);
    remote_ = known && std::ranges::find(kRemoteFileSystems, type) == kRemoteFileSystems.end() ? 0 : 1;
  }
  return remote_ == 1;
}

const MappedFile* Source::try_mapping() {
  try {
    return mapping().get();
  } catch (const Error&) {
    return nullptr;
  }
}

}  // namespace ff::ffrecord
