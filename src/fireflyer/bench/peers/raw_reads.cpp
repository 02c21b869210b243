// Reads one file through a second process and does no other work: the baseline of `fireflyer bench fs`.
//
//   raw_reads ring FILE BLOCK DEPTH       pread into shared memory; a ring in that memory holds the requests
//   raw_reads sendfile FILE BLOCK DEPTH   sendfile over one loopback connection
//
// Each line of input is COUNT SEED. The program reads COUNT blocks, at most DEPTH of them in flight,
// and prints the seconds.
// ring: random blocks; the reader waits for a whole batch before it requests the next batch.
// sendfile: blocks in order from block SEED on, with DEPTH always in flight.
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <random>
#include <string>

namespace {

constexpr std::uint32_t kSlots = 1024;
constexpr int kSpins = 2000;

[[noreturn]] void fail(const char* what) {
  std::perror(what);
  std::exit(1);
}

void check(bool good, const char* what) {
  if (!good) fail(what);
}

// A count that one process raises and another waits for: the waiter spins before it sleeps.
struct alignas(64) Count {
  std::atomic<std::uint32_t> value{0};
  std::atomic<std::uint32_t> asleep{0};

  void raise(std::uint32_t to) {
    value.store(to);
    if (asleep.load() != 0) syscall(SYS_futex, &value, FUTEX_WAKE, 1, nullptr, nullptr, 0);
  }

  // Waits until the value differs from `seen`, and returns it.
  std::uint32_t wait(std::uint32_t seen) {
    for (int spin = 0; spin < kSpins; ++spin) {
      const std::uint32_t now = value.load(std::memory_order_acquire);
      if (now != seen) return now;
      __builtin_ia32_pause();
    }
    asleep.store(1);
    while (value.load() == seen) syscall(SYS_futex, &value, FUTEX_WAIT, seen, nullptr, nullptr, 0);
    asleep.store(0);
    return value.load();
  }
};

struct Ring {
  Count asked;
  Count done;
  std::uint64_t offsets[kSlots];
};

struct Request {
  std::uint64_t offset;
  std::uint64_t length;
};

struct Job {
  int file;
  std::uint64_t size;
  std::uint64_t block;
  std::uint32_t depth;

  std::uint64_t blocks() const { return size / block; }
};

void serve_ring(const Job& job, Ring& ring, char* buffers) {
  std::uint32_t at = 0;
  for (;;) {
    const std::uint32_t end = ring.asked.wait(at);
    while (at != end) {
      char* to = buffers + job.block * (at % job.depth);
      const auto from = static_cast<off_t>(ring.offsets[at % kSlots]);
      check(pread(job.file, to, job.block, from) == static_cast<ssize_t>(job.block), "pread");
      ++at;
    }
    ring.done.raise(at);
  }
}

void read_ring(const Job& job, Ring& ring, std::uint64_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::uint32_t at = ring.asked.value.load();
  while (count > 0) {
    const auto batch = static_cast<std::uint32_t>(std::min<std::uint64_t>(count, job.depth));
    for (std::uint32_t i = 0; i < batch; ++i) {
      ring.offsets[(at + i) % kSlots] = random() % job.blocks() * job.block;
    }
    at += batch;
    count -= batch;
    ring.asked.raise(at);
    for (std::uint32_t seen = ring.done.value.load(); seen != at;) seen = ring.done.wait(seen);
  }
}

void receive(int line, void* to, std::uint64_t length) {
  char* at = static_cast<char*>(to);
  while (length > 0) {
    const ssize_t got = recv(line, at, length, 0);
    if (got == 0) std::exit(0);
    check(got > 0, "recv");
    at += got;
    length -= static_cast<std::uint64_t>(got);
  }
}

void serve_sendfile(const Job& job, int line) {
  for (;;) {
    Request request;
    receive(line, &request, sizeof request);
    auto offset = static_cast<off_t>(request.offset);
    for (std::uint64_t left = request.length; left > 0;) {
      const ssize_t sent = sendfile(line, job.file, &offset, left);
      check(sent > 0, "sendfile");
      left -= static_cast<std::uint64_t>(sent);
    }
  }
}

void read_sendfile(const Job& job, int line, char* buffers, std::uint64_t count, std::uint64_t first) {
  std::uint64_t asked = 0;
  for (std::uint64_t got = 0; got < count; ++got) {
    for (; asked < count && asked < got + job.depth; ++asked) {
      const Request request{(first + asked) % job.blocks() * job.block, job.block};
      check(send(line, &request, sizeof request, 0) == sizeof request, "send");
    }
    receive(line, buffers + job.block * (got % job.depth), job.block);
  }
}

// Connects two sockets over loopback: ends[0] is the server's, ends[1] the client's.
void connect_ends(int ends[2]) {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* plain = reinterpret_cast<sockaddr*>(&address);
  check(bind(listener, plain, length) == 0 && listen(listener, 1) == 0, "listen");
  check(getsockname(listener, plain, &length) == 0, "getsockname");
  ends[1] = socket(AF_INET, SOCK_STREAM, 0);
  check(connect(ends[1], plain, length) == 0, "connect");
  ends[0] = accept(listener, nullptr, nullptr);
  check(ends[0] >= 0, "accept");
  close(listener);
  const int on = 1;
  for (int i = 0; i < 2; ++i) setsockopt(ends[i], IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

void* shared(std::size_t size) {
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  check(memory != MAP_FAILED, "mmap");
  std::memset(memory, 0, size);
  return memory;
}

}  // namespace

int main(int count, char** words) {
  if (count != 5) {
    std::fputs("raw_reads ring|sendfile FILE BLOCK DEPTH\n", stderr);
    return 2;
  }
  const bool ring_way = std::string(words[1]) == "ring";
  Job job{open(words[2], O_RDONLY), 0, std::strtoull(words[3], nullptr, 10),
          static_cast<std::uint32_t>(std::strtoul(words[4], nullptr, 10))};
  struct stat status;
  check(job.file >= 0 && fstat(job.file, &status) == 0, words[2]);
  job.size = static_cast<std::uint64_t>(status.st_size);
  check(job.block > 0 && job.depth > 0 && job.depth <= kSlots && job.blocks() > 0, "arguments");
  auto* ring = new (shared(sizeof(Ring))) Ring;
  auto* buffers = static_cast<char*>(shared(job.block * job.depth));
  int ends[2] = {-1, -1};
  if (!ring_way) connect_ends(ends);
  const pid_t parent = getpid();
  const pid_t server = fork();
  check(server >= 0, "fork");
  if (server == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) return 1;
    if (!ring_way) {
      close(ends[1]);
      serve_sendfile(job, ends[0]);
    }
    serve_ring(job, *ring, buffers);
  }
  if (!ring_way) close(ends[0]);
  std::uint64_t wanted = 0;
  std::uint64_t seed = 0;
  while (std::cin >> wanted >> seed) {
    const auto began = std::chrono::steady_clock::now();
    if (ring_way) {
      read_ring(job, *ring, wanted, seed);
    } else {
      read_sendfile(job, ends[1], buffers, wanted, seed);
    }
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - began;
    std::printf("%.9f\n", taken.count());
    std::fflush(stdout);
  }
  return 0;
}
