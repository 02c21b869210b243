// Helpers of this folder's tests: a temporary file, and an I/O queue with faults.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "base/io/io_queue.hpp"
#include "base/testing/check.hpp"
#include "base/testing/test_bytes.hpp"

namespace ff::storage {

// An empty file; removed with the object.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& directory = "/var/tmp") : path_(directory + "/fireflyer-test-XXXXXX") {
    fd_ = ::mkstemp(path_.data());
    CHECK(fd_ >= 0);
  }
  ~TemporaryFile() {
    ::close(fd_);
    ::unlink(path_.c_str());
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  int fd() const { return fd_; }
  const std::string& path() const { return path_; }

  std::vector<char> bytes() const {
    const int fd = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
    const off_t size = ::lseek(fd, 0, SEEK_END);
    std::vector<char> found(static_cast<std::size_t>(size));
    CHECK(fd >= 0 && ::pread(fd, found.data(), found.size(), 0) == size);
    ::close(fd);
    return found;
  }

 private:
  std::string path_;
  int fd_;
};

inline std::vector<char> random_bytes(std::size_t size, unsigned seed) {
  std::vector<char> bytes(size);
  fill_random(bytes.data(), size, seed);
  return bytes;
}

// An I/O queue that completes requests in any order; some reads and writes are short or interrupted. If `error` is not
// 0, all requests from number `refused_from` on fail with it.
class RoughQueue final : public IoQueue {
 public:
  RoughQueue(unsigned entries, int refused_from, int error) : entries_(entries), left_(refused_from), error_(error) {}
  ~RoughQueue() override { CHECK(waiting_.empty()); }
  void read(int fd, void* to, std::size_t bytes, std::int64_t offset, std::uint64_t tag) override {
    add({false, fd, static_cast<char*>(to), bytes, offset, tag});
  }
  void write(int fd, const void* from, std::size_t bytes, std::int64_t offset, std::uint64_t tag) override {
    add({true, fd, const_cast<char*>(static_cast<const char*>(from)), bytes, offset, tag});
  }
  void submit(unsigned wanted) override { CHECK(wanted <= waiting_.size()); }
  bool take(IoResult& result) override {
    if (waiting_.empty() || random_() % 3 == 0) return false;
    const auto which = static_cast<std::ptrdiff_t>(random_() % waiting_.size());
    const IoRequest request = waiting_[static_cast<std::size_t>(which)];
    waiting_.erase(waiting_.begin() + which);
    result = {request.tag, perform(request)};
    return true;
  }
  unsigned capacity() const override { return entries_; }
  bool own() const override { return true; }

 private:
  void add(const IoRequest& request) {
    CHECK(waiting_.size() < entries_);
    waiting_.push_back(request);
  }

  std::int64_t perform(const IoRequest& request) {
    if (error_ != 0 && left_-- <= 0) return -error_;
    const auto mood = random_() % 6;
    if (mood == 0) return -EINTR;
    if (mood == 1) return -EAGAIN;
    std::size_t bytes = request.bytes;
    if (mood == 2 && bytes >= 8192) bytes = 4096 + random_() % (bytes / 4096 - 1) * 4096;
    const ssize_t done = request.writes ? ::pwrite(request.fd, request.memory, bytes, request.offset)
                                        : ::pread(request.fd, request.memory, bytes, request.offset);
    return done < 0 ? -errno : done;
  }

  std::vector<IoRequest> waiting_;
  std::mt19937 random_{1};
  const unsigned entries_;
  int left_;
  const int error_;
};

}  // namespace ff::storage
