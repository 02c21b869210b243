// The ring against the real kernel and against a faulty one. Every read and write arrives once, despite interruptions
// and memory pressure; a kernel that forbids rings is detected; a forked child leaves its parent's ring alone. A thread
// queue passes the tests of reads, writes and errors, too.
#include "base/io/uring.hpp"

#include <fcntl.h>
#include <linux/io_uring.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <vector>

#include "base/error.hpp"
#include "base/io/thread_queue.hpp"
#include "base/testing/check.hpp"

namespace {

using ff::IoQueue;
using ff::IoResult;

constexpr unsigned kEntries = 8;
constexpr std::size_t kBlock = 1000;

int make_file() {
  char path[] = "/tmp/fireflyer-uring-test-XXXXXX";
  const int fd = ::mkstemp(path);
  CHECK(fd >= 0);
  ::unlink(path);
  std::vector<unsigned char> bytes(kEntries * kBlock);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<unsigned char>(i / kBlock + 1);
  CHECK(::write(fd, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
  return fd;
}

void read_all(IoQueue& queue, int fd) {
  CHECK(queue.own() && queue.capacity() == kEntries);
  for (int round = 0; round < 100; ++round) {
    std::vector<unsigned char> bytes(kEntries * kBlock);
    for (unsigned i = 0; i < kEntries; ++i) queue.read(fd, &bytes[i * kBlock], kBlock, i * kBlock, i);
    std::vector<int> seen(kEntries);
    for (unsigned taken = 0; taken < kEntries;) {
      queue.submit(1);
      for (IoResult result; queue.take(result); ++taken) {
        CHECK(result.bytes == kBlock);
        ++seen[result.tag];
      }
    }
    for (unsigned i = 0; i < kEntries; ++i) {
      CHECK(seen[i] == 1);
      for (std::size_t b = 0; b < kBlock; ++b) CHECK(bytes[i * kBlock + b] == i + 1);
    }
  }
}

void write_all(IoQueue& queue) {
  const int fd = make_file();
  std::vector<unsigned char> bytes(kEntries * kBlock);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<unsigned char>(i / kBlock + 100);
  for (unsigned i = 0; i < kEntries; ++i) queue.write(fd, &bytes[i * kBlock], kBlock, i * kBlock, i);
  queue.submit(kEntries);
  IoResult result;
  for (unsigned i = 0; i < kEntries; ++i) CHECK(queue.take(result) && result.bytes == kBlock);
  CHECK(!queue.take(result));
  std::vector<unsigned char> found(bytes.size());
  CHECK(::pread(fd, found.data(), found.size(), 0) == static_cast<ssize_t>(found.size()) && found == bytes);
  ::close(fd);
}

void errors_of_reads(IoQueue& queue, int fd) {
  unsigned char byte;
  queue.read(fd, &byte, 1, kEntries * kBlock, 1);
  queue.submit(1);
  IoResult result;
  CHECK(queue.take(result) && result.bytes == 0 && result.tag == 1);
  queue.read(-1, &byte, 1, 0, 2);
  queue.submit(1);
  CHECK(queue.take(result) && result.bytes == -EBADF && !queue.take(result));
}

// Every second call is interrupted, and some of the other calls are refused for lack of memory. Each remaining call
// takes one entry.
void interrupted_and_refused_calls(int fd) {
  const ff::uring::Calls& real = ff::uring::kernel();
  int calls = 0;
  ff::uring::Calls bad = real;
  bad.enter = [&](int ring, unsigned submit, unsigned wanted, unsigned flags) {
    ++calls;
    if (calls % 2 == 0) return -EINTR;
    if (calls % 3 == 0 && submit > 1 && submit < kEntries) return -EAGAIN;
    return real.enter(ring, submit > 0 ? 1 : 0, submit > 1 ? 0 : wanted, flags);
  };
  read_all(*ff::uring::make(kEntries, bad), fd);

  bad.enter = [](int, unsigned, unsigned, unsigned) { return -EAGAIN; };
  const auto queue = ff::uring::make(kEntries, bad);
  unsigned char byte;
  queue->read(fd, &byte, 1, 0, 0);
  try {
    queue->submit(1);  // no request is in flight whose end could make room
    CHECK(false);
  } catch (const ff::Error& error) {
    CHECK(error.code() == ff::Code::storage);
  }
}

void barred() {
  for (const int error : {ENOSYS, EPERM, ENOMEM}) {
    ff::uring::Calls calls = ff::uring::kernel();
    calls.setup = [error](unsigned, io_uring_params*) { return -error; };
    CHECK(ff::uring::make(kEntries, calls) == nullptr);
  }
  ff::uring::Calls old = ff::uring::kernel();
  old.setup = [](unsigned entries, io_uring_params* params) {
    const int ring = ff::uring::kernel().setup(entries, params);
    params->features &= ~IORING_FEAT_RW_CUR_POS;
    return ring;
  };
  CHECK(ff::uring::make(kEntries, old) == nullptr);
}

void fork_leaves_it(int fd) {
  auto queue = ff::uring::make(kEntries);
  const pid_t child = ::fork();
  if (child == 0) {
    const bool dead = !queue->own();
    queue = nullptr;
    const auto fresh = ff::uring::make(kEntries);
    read_all(*fresh, fd);
    ::_exit(dead ? 0 : 1);
  }
  read_all(*queue, fd);
  int status;
  CHECK(::waitpid(child, &status, 0) == child && status == 0);
  read_all(*queue, fd);
}

}  // namespace

int main() {
  barred();
  const int fd = make_file();
  {
    const auto threads = ff::thread_queue::make(kEntries, 3);
    read_all(*threads, fd);
    write_all(*threads);
    errors_of_reads(*threads, fd);
  }
  const auto queue = ff::uring::make(kEntries);
  if (!queue) {
    std::puts("no io_uring here");
    return 77;
  }
  read_all(*queue, fd);
  write_all(*queue);
  errors_of_reads(*queue, fd);
  interrupted_and_refused_calls(fd);
  fork_leaves_it(fd);
  ::close(fd);
  return 0;
}
