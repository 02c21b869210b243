// Tests of the UCX transport between threads, over UCX's TCP alone and with CMA. With CMA a receiver fetches long
// messages from the sender's memory, as over RDMA. Contents and order, sizes below and above the limits between UCX's
// protocols, late links, wakes, abort, peers that leave or die, unauthenticated peers. Loading UCX must not change
// signal handlers. Skipped if libucp.so.0 is unavailable.
#include "hfreduce/transport/ucx.hpp"

#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <atomic>
#include <cstdlib>
#include <latch>
#include <thread>

#include "hfreduce/transport/transport_scenes.hpp"

using namespace ff;
using namespace ff::hfreduce;
using namespace ff::hfreduce::scenes;

// The library is not instrumented: its own thread and locks look like races if it calls intercepted functions of the C
// library. Accesses of our code are still checked.
extern "C" const char* __tsan_default_options() { return "ignore_noninstrumented_modules=1"; }

namespace {

// Links two ranks in one direction.
void join(UcxTransport& from, int from_rank, UcxTransport& to, int to_rank) {
  const Pair pair = unix_pair();
  from.add_outgoing(to_rank, pair[0]);
  to.add_incoming(from_rank, pair[1]);
}

std::vector<char> pattern(std::size_t bytes, std::size_t seed) {
  std::vector<char> data(bytes);
  fill_random(data.data(), bytes, seed);
  return data;
}

// Drives the transport until `over`.
void attend(UcxTransport& transport, const std::atomic<bool>& over) {
  while (!over) {
    if (!transport.progress()) transport.wait(milliseconds(10));
  }
}

// Messages in one direction, all in flight at once.
void test_sizes() {
  const std::vector<std::size_t> sizes = {1,     7,       64,      1000,          8191,    8192, 8193,
                                          65536, 100'000, 1 << 20, (1 << 20) + 1, 8 << 20, 1,    3 << 20};
  UcxTransport from, to;
  join(from, 0, to, 1);
  std::vector<std::vector<char>> out, in;
  std::vector<Transfer> sends, receives;
  for (const std::size_t bytes : sizes) {
    out.push_back(pattern(bytes, sends.size()));
    in.emplace_back(bytes);
    sends.push_back({out.back().data(), bytes});
    receives.push_back({in.back().data(), bytes});
  }
  std::thread sender([&] {
    for (auto& transfer : sends) from.send(1, transfer);
    finish(from, sends);
  });
  for (auto& transfer : receives) to.receive(0, transfer);
  finish(to, receives);
  sender.join();
  CHECK(in == out);
}

void test_wakes() {
  UcxTransport transport;
  const Pair pair = unix_pair();
  transport.add_incoming(3, pair[1]);
  char byte;
  Transfer receive{&byte, 1};
  transport.receive(3, receive);
  while (transport.progress()) {
  }
  transport.wait(kLong);  // ends because a link was added
  transport.wake();
  transport.progress();  // must not consume the wake
  transport.wait(kLong);
  std::latch waiting(1);
  std::thread other([&] {
    waiting.wait();
    transport.wake();
  });
  waiting.count_down();
  transport.wait(kLong);
  other.join();
  ::close(pair[0]);
}

// After an abort, the memory of the transfers may be freed at once.
void test_abort() {
  UcxTransport transport, peer;
  join(peer, 3, transport, 0);
  join(transport, 0, peer, 3);
  auto bytes = std::make_unique<std::vector<char>>(4u << 20);
  Transfer receive{bytes->data(), bytes->size()}, send = receive;
  transport.receive(3, receive);
  transport.send(3, send);
  std::latch waiting(1);
  std::thread other([&] {
    waiting.wait();
    transport.abort();
  });
  std::atomic<bool> over = false;
  std::thread attendant([&] { attend(peer, over); });
  const Error error = error_of([&] {
    waiting.count_down();
    for (;;) {
      if (!transport.progress()) transport.wait(kLong);
    }
  });
  bytes.reset();
  CHECK(error.code() == Code::collective);
  CHECK(error_of([&] { transport.progress(); }).code() == Code::collective);
  CHECK(error_of([&] { transport.send(3, send); }).code() == Code::collective);
  over = true;
  other.join();
  attendant.join();
}

// Messages that were done before the sender left arrive. The end is an error only for a receive of a further message.
void test_leaving_sender() {
  UcxTransport to;
  const auto first = pattern(3, 1), second = pattern(500'000, 2);
  std::atomic<bool> over = false;
  std::thread sender([&] {
    {
      UcxTransport from;
      join(from, 5, to, 0);
      auto out = std::vector{first, second};
      std::vector<Transfer> sends = {{out[0].data(), 3}, {out[1].data(), out[1].size()}};
      for (auto& transfer : sends) from.send(0, transfer);
      finish(from, sends);
    }
    over = true;
  });
  std::vector<char> got_first(3), got_second(second.size());
  std::vector<Transfer> receives = {{got_second.data(), got_second.size()}};
  Transfer early{got_first.data(), 3};
  to.receive(5, early);
  to.receive(5, receives[0]);
  attend(to, over);
  finish(to, receives);
  sender.join();
  CHECK(early.done && got_first == first && got_second == second);
  for (int k = 0; k < 3; ++k) to.progress();
  char byte;
  std::vector<Transfer> late = {{&byte, 1}};
  const Error error = error_of([&] {
    to.receive(5, late[0]);
    finish(to, late);
  });
  CHECK(error.code() == Code::rank_failed && error.rank() == 5);
}

// Small messages whose sender leaves when they are done, before the receiver has posted receives.
void test_hasty_senders() {
  for (int round = 0; round < 10; ++round) {
    UcxTransport to;
    std::atomic<bool> over = false;
    std::thread sender([&] {
      {
        UcxTransport from;
        join(from, 5, to, 0);
        auto out = pattern(100, 3);
        std::vector<Transfer> sends(1);
        sends[0] = {out.data(), out.size()};
        from.send(0, sends[0]);
        finish(from, sends);
      }
      over = true;
    });
    attend(to, over);
    std::vector<char> in(100);
    std::vector<Transfer> receives = {{in.data(), in.size()}};
    to.receive(5, receives[0]);
    finish(to, receives);
    CHECK(in == pattern(100, 3));
    sender.join();
  }
}

// A peer that dies announces nothing. `address_sent`: the peer has sent its address before.
void test_death(bool address_sent) {
  UcxTransport here;
  const Pair to_it = unix_pair(), from_it = unix_pair();
  here.add_outgoing(6, to_it[0]);
  here.add_incoming(7, from_it[1]);
  auto other = std::make_unique<UcxTransport>();
  if (address_sent) {
    const Pair real = unix_pair();
    other->add_incoming(0, real[0]);
    const int between = real[1];
    std::array<char, 4096> handshake;
    ssize_t bytes = -1;
    while (bytes < 0) {
      other->progress();
      bytes = ::recv(between, handshake.data(), handshake.size(), MSG_DONTWAIT);
    }
    CHECK(::write(to_it[1], handshake.data(), static_cast<std::size_t>(bytes)) == bytes);
    ::close(between);
  }
  std::vector<char> bytes(16u << 20);
  std::vector<Transfer> send(1), receive(1);
  send[0] = {bytes.data(), bytes.size()};
  receive[0] = {bytes.data(), 1};
  here.send(6, send[0]);
  for (int k = 0; k < 100; ++k) here.progress();
  ::close(to_it[1]);
  const Error error = error_of([&] { finish(here, send); });
  CHECK(error.code() == Code::rank_failed && error.rank() == 6 && !send[0].done);
  ::close(from_it[0]);

  UcxTransport again;
  const Pair third = unix_pair();
  again.add_incoming(7, third[1]);
  again.receive(7, receive[0]);
  ::close(third[0]);
  const Error silent = error_of([&] { finish(again, receive); });
  CHECK(silent.code() == Code::rank_failed && silent.rank() == 7);
}

void test_leaving_receiver() {
  UcxTransport from;
  auto to = std::make_unique<UcxTransport>();
  join(from, 0, *to, 6);
  auto bytes = pattern(32u << 20, 1);
  std::vector<Transfer> sends(2);
  std::vector<char> in(1000);
  std::vector<Transfer> taken = {{in.data(), in.size()}};
  sends[0] = {bytes.data(), in.size()};
  sends[1] = {bytes.data(), bytes.size()};
  std::thread receiver([&] {
    to->receive(0, taken[0]);
    finish(*to, taken);
    to.reset();
  });
  for (auto& transfer : sends) from.send(6, transfer);
  const Error error = error_of([&] { finish(from, sends); });
  CHECK(error.code() == Code::rank_failed && error.rank() == 6);
  CHECK(sends[0].done && !sends[1].done);
  receiver.join();
}

// A peer that breaks the group for its own reason stays alive and does not announce that it leaves.
void test_abort_of_the_peer() {
  UcxTransport from, to;
  join(from, 0, to, 6);
  std::vector<char> bytes(32u << 20), in(10);
  std::vector<Transfer> first(1), second(1), taken(1);
  first[0] = {bytes.data(), 10};
  second[0] = {bytes.data(), bytes.size()};
  taken[0] = {in.data(), 10};
  std::thread receiver([&] {
    to.receive(0, taken[0]);
    finish(to, taken);
    to.abort();
  });
  from.send(6, first[0]);
  finish(from, first);
  receiver.join();
  from.send(6, second[0]);
  const Error error = error_of([&] { finish(from, second); });
  CHECK(error.code() == Code::rank_failed && error.rank() == 6);
  CHECK(std::string(error.what()).find("the UCX connection with rank 6 failed") == 0);
}

void test_other_lengths(std::size_t sent, std::size_t awaited) {
  UcxTransport from, to;
  join(from, 4, to, 0);
  auto out = pattern(sent, 1);
  std::vector<char> in(awaited);
  std::atomic<bool> over = false;
  std::thread sender([&] {
    Transfer send{out.data(), sent};
    from.send(0, send);
    attend(from, over);
    from.abort();  // `send` may not be done
  });
  std::vector<Transfer> receive = {{in.data(), awaited}};
  to.receive(4, receive[0]);
  const Error error = error_of([&] { finish(to, receive); });
  CHECK(error.code() == Code::collective && !receive[0].done);
  over = true;
  sender.join();
}

void test_protocol_violations() {
  const std::vector<char> noise(100'000, 'x');
  for (const bool incoming : {false, true}) {
    UcxTransport transport;
    const Pair pair = unix_pair();
    incoming ? transport.add_incoming(2, pair[1]) : transport.add_outgoing(2, pair[1]);
    CHECK(::send(pair[0], noise.data(), noise.size(), MSG_DONTWAIT) > 0);
    const Error error = error_of([&] {
      for (;;) {
        if (!transport.progress()) transport.wait(kLong);
      }
    });
    CHECK(error.code() == Code::collective);
    ::close(pair[0]);
  }
}

void test_twice() {
  UcxTransport transport;
  const Pair a = unix_pair(), b = unix_pair();
  transport.add_outgoing(1, a[0]);
  transport.add_incoming(1, a[1]);
  CHECK(error_of([&] { transport.add_outgoing(1, b[0]); }).code() == Code::invalid);
  ::close(b[1]);
}

void test_exchanges() {
  constexpr std::size_t kMembers = 3;
  std::vector<UcxTransport> transports(kMembers);
  std::vector<std::thread> threads;
  for (std::size_t m = 0; m < kMembers; ++m) {
    threads.emplace_back([&, m] { reduce(transports[m], m, kMembers); });
  }
  for (std::size_t from = 0; from < kMembers; ++from) {
    for (std::size_t to = 0; to < kMembers; ++to) {
      if (from != to) join(transports[from], static_cast<int>(from), transports[to], static_cast<int>(to));
    }
  }
  for (auto& thread : threads) thread.join();
}

// A forked child that destroys its copy of a transport leaves the parent's transport unchanged. A new transport in the
// child throws an error.
void test_fork() {
  UcxTransport from, to;
  join(from, 0, to, 1);
  const auto pass = [&](std::size_t seed) {
    auto out = pattern(300'000, seed);
    std::vector<char> in(out.size());
    std::vector<Transfer> sends(1), receives(1);
    sends[0] = {out.data(), out.size()};
    receives[0] = {in.data(), in.size()};
    std::thread sender([&] {
      from.send(1, sends[0]);
      finish(from, sends);
    });
    to.receive(0, receives[0]);
    finish(to, receives);
    sender.join();
    CHECK(in == out);
  };
  pass(1);
  const pid_t child = ::fork();
  if (child == 0) {
    from.~UcxTransport();
    const Error error = error_of([] { UcxTransport another; });
    ::_exit(error.code() == Code::collective ? 0 : 1);
  }
  int status = -1;
  CHECK(::waitpid(child, &status, 0) == child && status == 0);
  pass(2);
}

// Loading UCX changes no signal handler and rewrites no function of the C library.
bool load() {
  struct Handler {
    void (*of)(int);
  };
  std::array<Handler, 32> before{}, after{};
  const auto look = [](std::array<Handler, 32>& handlers) {
    for (int number = 1; number < 32; ++number) {
      struct sigaction action{};
      CHECK(::sigaction(number, nullptr, &action) == 0);
      handlers[static_cast<std::size_t>(number)].of = action.sa_handler;
    }
  };
  std::array<char, 16> code, code_after;
  void* map = ::dlsym(RTLD_DEFAULT, "munmap");
  std::memcpy(code.data(), map, code.size());
  look(before);
  try {
    ucx::api();
  } catch (const Error& error) {
    CHECK(error.code() == Code::collective);
    CHECK(std::string(error.what()).find("libucx0") != std::string::npos);
    std::printf("skipped: %s\n", error.what());
    return false;
  }
  look(after);
  for (std::size_t number = 1; number < 32; ++number) CHECK(before[number].of == after[number].of);
  CHECK(std::getenv("UCX_ERROR_SIGNALS") == nullptr);
  if (::access("/sys/class/infiniband", F_OK) != 0) {
    std::memcpy(code_after.data(), map, code.size());
    CHECK(code == code_after);
  }
  return true;
}

// Two ranks that have no transport in common.
void test_no_way() {
  ::setenv("UCX_TLS", "tcp", 1);
  UcxTransport from;
  ::setenv("UCX_TLS", "posix", 1);
  UcxTransport to;
  join(from, 0, to, 8);
  char byte = 0;
  std::vector<Transfer> sends = {{&byte, 1}};
  from.send(8, sends[0]);
  std::atomic<bool> over = false;
  std::thread attendant([&] { attend(to, over); });
  const Error error = error_of([&] { finish(from, sends); });
  CHECK(error.code() == Code::rank_failed && error.rank() == 8);
  CHECK(std::string(error.what()).find("UCX_TLS") != std::string::npos);
  over = true;
  attendant.join();
}

void test_no_transport() {
  ::setenv("UCX_TLS", "no_such", 1);
  const Error error = error_of([] { UcxTransport none; });
  CHECK(error.code() == Code::collective);
}

}  // namespace

int main() {
  if (!load()) return 77;
  for (const char* transports : {"tcp", "tcp,cma"}) {
    ::setenv("UCX_TLS", transports, 1);
    for (const std::uint64_t seed : {1, 2}) {
      test_traffic<UcxTransport>(unix_pair, seed);
      test_traffic<UcxTransport>(tcp_pair, seed);
    }
    test_sizes();
    test_wakes();
    test_abort();
    test_leaving_sender();
    test_hasty_senders();
    test_death(false);
    if (!FF_THREAD_SANITIZER) test_death(true);  // a race in UCX 1.13 may abort the process here
    test_leaving_receiver();
    test_abort_of_the_peer();
    test_other_lengths(100, 10);
    test_other_lengths(10, 100);
    test_other_lengths(4 << 20, 1 << 20);
    test_protocol_violations();
    test_twice();
    test_exchanges();
    test_fork();
  }
  test_no_way();
  test_no_transport();
  return 0;
}
