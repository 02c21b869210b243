#include "fs3/store/disk/directory_disk.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/error.hpp"

namespace ff::fs3::store {
namespace {

constexpr std::size_t kPage = 4096;                      // unit of a direct write
constexpr std::size_t kDirect = std::size_t{256} << 10;  // writes of at least this size use O_DIRECT

}  // namespace

DirectoryDisk::DirectoryDisk(const std::string& path) : path_(path) {
  if (::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) throw_errno("mkdir " + path);
  directory_ = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (directory_ < 0) throw_errno("open " + path);
  if (::flock(directory_, LOCK_EX | LOCK_NB) != 0) {
    const int error = errno;
    ::close(directory_);
    if (error == EWOULDBLOCK) throw Error(Code::storage, path + " is in use");
    throw_errno("lock " + path, error);
  }
}

DirectoryDisk::~DirectoryDisk() { ::close(directory_); }

File DirectoryDisk::open(const std::string& name, bool create) {
  const int file = ::openat(directory_, name.c_str(), O_RDWR | O_CLOEXEC | (create ? O_CREAT : 0), 0600);
  if (file >= 0) return file;
  if (errno == ENOENT && !create) return kNoFile;
  throw_errno("open " + path_ + "/" + name);
}

void DirectoryDisk::close(File file) noexcept { ::close(file); }

void DirectoryDisk::write(File file, std::uint64_t offset, const void* from, std::size_t bytes) {
  const auto* p = static_cast<const char*>(from);
  if (const std::size_t pages = bytes / kPage * kPage; pages >= kDirect) {
    iovec part{const_cast<char*>(p), pages};
    if (write_direct(file, offset, {&part, 1})) {
      p += pages;
      offset += pages;
      bytes -= pages;
    }
  }
  while (bytes > 0) {
    const ssize_t n = ::pwrite(file, p, bytes, static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw_errno("write in " + path_);
    p += n;
    offset += static_cast<std::uint64_t>(n);
    bytes -= static_cast<std::size_t>(n);
  }
}

void DirectoryDisk::write_parts(File file, std::uint64_t offset, std::span<const std::span<const std::byte>> parts) {
  std::vector<iovec> all;
  std::size_t bytes = 0;
  for (const auto& part : parts) {
    all.push_back({const_cast<std::byte*>(part.data()), part.size()});
    bytes += part.size();
  }
  if (bytes < kDirect || !write_direct(file, offset, all)) Disk::write_parts(file, offset, parts);
}

// Writes all parts with O_DIRECT. Returns false, perhaps after writing some parts, if that is impossible: a part is not
// whole pages, or the file system refuses O_DIRECT. Uses a separate descriptor, because the flag would affect all users
// of `file`.
bool DirectoryDisk::write_direct(File file, std::uint64_t offset, std::span<iovec> parts) {
  const auto whole = [](const iovec& part) {
    return reinterpret_cast<std::uintptr_t>(part.iov_base) % kSector == 0 && part.iov_len % kPage == 0;
  };
  if (!direct_ || offset % kPage != 0 || !std::all_of(parts.begin(), parts.end(), whole)) return false;
  const int direct = ::open(("/proc/self/fd/" + std::to_string(file)).c_str(), O_WRONLY | O_DIRECT | O_CLOEXEC);
  int error = direct < 0 ? EINVAL : 0;
  while (error == 0 && !parts.empty()) {
    const ssize_t n = ::pwritev(direct, parts.data(), static_cast<int>(parts.size()), static_cast<off_t>(offset));
    if (n <= 0) {
      if (n == 0 || errno != EINTR) error = n == 0 ? EINVAL : errno;
      continue;
    }
    offset += static_cast<std::uint64_t>(n);
    auto left = static_cast<std::size_t>(n);
    while (!parts.empty() && left >= parts.front().iov_len) {
      left -= parts.front().iov_len;
      parts = parts.subspan(1);
    }
    if (left != 0) parts.front() = {static_cast<char*>(parts.front().iov_base) + left, parts.front().iov_len - left};
  }
  if (direct >= 0) ::close(direct);
  if (error == EINVAL) direct_ = false;
  else if (error != 0) throw_errno("write in " + path_, error);
  return error == 0;
}

std::size_t DirectoryDisk::read(File file, std::uint64_t offset, void* to, std::size_t bytes) {
  auto* p = static_cast<char*>(to);
  std::size_t got = 0;
  while (got < bytes) {
    const ssize_t n = ::pread(file, p + got, bytes - got, static_cast<off_t>(offset + got));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw_errno("read in " + path_);
    if (n == 0) break;
    got += static_cast<std::size_t>(n);
  }
  return got;
}

std::uint64_t DirectoryDisk::size(File file) {
  struct stat status;
  if (::fstat(file, &status) != 0) throw_errno("stat in " + path_);
  return static_cast<std::uint64_t>(status.st_size);
}

void DirectoryDisk::truncate(File file, std::uint64_t size) {
  if (::ftruncate(file, static_cast<off_t>(size)) != 0) throw_errno("truncate in " + path_);
}

void DirectoryDisk::punch(File file, std::uint64_t offset, std::uint64_t bytes) {
  if (::fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                  static_cast<off_t>(bytes)) == 0)
    return;
  if (errno != EOPNOTSUPP) throw_errno("punch a hole in " + path_);
  // A file system without holes: writes the zeros, up to the file's end.
  const std::string zeros(std::min<std::uint64_t>(bytes, 1 << 20), '\0');
  const std::uint64_t end = std::min(offset + bytes, size(file));
  for (; offset < end; offset += zeros.size())
    write(file, offset, zeros.data(), std::min<std::uint64_t>(zeros.size(), end - offset));
}

void DirectoryDisk::sync(File file) {
  if (::fdatasync(file) != 0) throw_errno("sync in " + path_);
}

std::vector<std::string> DirectoryDisk::list() {
  const int copy = ::openat(directory_, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR* const stream = copy < 0 ? nullptr : ::fdopendir(copy);
  if (stream == nullptr) throw_errno("list " + path_);
  std::vector<std::string> names;
  errno = 0;
  while (const dirent* const entry = ::readdir(stream)) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
    errno = 0;
  }
  const int error = errno;
  ::closedir(stream);
  if (error != 0) throw_errno("list " + path_, error);
  std::sort(names.begin(), names.end());
  return names;
}

void DirectoryDisk::remove(const std::string& name) {
  if (::unlinkat(directory_, name.c_str(), 0) != 0 && errno != ENOENT) throw_errno("remove " + path_ + "/" + name);
}

void DirectoryDisk::rename(const std::string& from, const std::string& to) {
  if (::renameat(directory_, from.c_str(), directory_, to.c_str()) != 0)
    throw_errno("rename " + path_ + "/" + from + " to " + to);
}

void DirectoryDisk::sync_names() {
  if (::fsync(directory_) != 0) throw_errno("sync " + path_);
}

std::uint64_t DirectoryDisk::free_bytes() {
  struct statvfs status;
  if (::fstatvfs(directory_, &status) != 0) throw_errno("statvfs " + path_);
  return static_cast<std::uint64_t>(status.f_bavail) * status.f_frsize;
}

}  // namespace ff::fs3::store
