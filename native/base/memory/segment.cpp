#include "base/memory/segment.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <utility>

#include "base/error.hpp"
#include "base/memory/available_memory.hpp"

namespace ff {
namespace {

// Policies set through a mapping stay with the memory after the mapping is gone. Closes `fd` if it throws.
void place_pages(int fd, std::size_t bytes, const Segment::Place& place) {
  void* p = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (p == MAP_FAILED) {
    const int error = errno;
    ::close(fd);
    throw_errno("cannot map a shared segment of " + std::to_string(bytes) + " bytes", error);
  }
  try {
    place(static_cast<char*>(p));
  } catch (...) {
    ::munmap(p, bytes);
    ::close(fd);
    throw;
  }
  ::munmap(p, bytes);
}

}  // namespace

Segment::Segment(int fd, std::size_t size) : fd_(fd), size_(size) {
  // Populates at once, because a page fault inside a reduction would cost more than here.
  void* p = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
  if (p == MAP_FAILED) {
    const int error = errno;
    ::close(fd);
    throw_errno("cannot map a shared segment of " + std::to_string(size) + " bytes", error);
  }
  data_ = static_cast<char*>(p);
}

Segment Segment::create(const std::string& name, std::size_t bytes, const Place& place) {
  const std::string what = "cannot reserve " + std::to_string(bytes) + " bytes of shared memory";
  // Checked here, because the kernel would hand out pages until the OOM killer ends a process.
  if (bytes > available_memory()) throw_errno(what, ENOMEM);
  const int fd = ::memfd_create(name.c_str(), MFD_CLOEXEC);
  if (fd < 0) throw_errno("cannot create a shared segment");
  if (place) place_pages(fd, bytes, place);
  // fallocate, not ftruncate: a refused reservation is an error here instead of a SIGBUS later.
  if (::fallocate(fd, 0, 0, static_cast<off_t>(bytes)) != 0) {
    const int error = errno;
    ::close(fd);
    throw_errno(what, error);
  }
  return Segment(fd, bytes);
}

Segment Segment::attach(int fd) {
  struct stat info{};
  if (::fstat(fd, &info) != 0) {
    const int error = errno;
    ::close(fd);
    throw_errno("cannot read the size of a peer's segment", error);
  }
  return Segment(fd, static_cast<std::size_t>(info.st_size));
}

Segment::Segment(Segment&& other) noexcept { *this = std::move(other); }

Segment& Segment::operator=(Segment&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

Segment::~Segment() {
  if (data_ != nullptr) ::munmap(data_, size_);
  if (fd_ >= 0) ::close(fd_);
}

}  // namespace ff
