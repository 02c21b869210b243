// The socket transport between threads: content and order, late links, wakes, abort, and the death
// of a peer.
#include "hfreduce/tcp.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <functional>
#include <latch>
#include <random>
#include <thread>
#include <vector>

#include "base/check.hpp"
#include "hfreduce/exchange.hpp"

using namespace ff;
using namespace ff::hfreduce;
using std::chrono::milliseconds;

namespace {

constexpr milliseconds kLong{60'000};

using Pair = std::array<int, 2>;

Pair unix_pair() {
  Pair pair;
  CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair.data()) == 0);
  return pair;
}

Pair tcp_pair() {
  const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = ::htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  CHECK(::bind(listener, generic, length) == 0 && ::listen(listener, 1) == 0);
  CHECK(::getsockname(listener, generic, &length) == 0);
  const int from = ::socket(AF_INET, SOCK_STREAM, 0);
  CHECK(::connect(from, generic, length) == 0);
  const int to = ::accept(listener, nullptr, nullptr);
  CHECK(to >= 0);
  ::close(listener);
  return {from, to};
}

void finish(TcpTransport& transport, std::vector<Transfer>& transfers) {
  for (auto& transfer : transfers) {
    while (!transfer.done) {
      if (!transport.progress()) transport.wait(kLong);
    }
  }
}

// The error that `action` ends with.
Error error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error;
  }
  CHECK(!"an error was expected");
  std::abort();
}

// One of two ranks that send each other messages of the same random sizes, all posted at once or a
// few at a time.
void talk(TcpTransport& transport, int me, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::uint64_t total = 0;
  for (int round = 0; round < 20; ++round) {
    const std::size_t messages = 1 + random() % 100;
    const std::size_t longest = random() % 3 == 0 ? 200'000 : 300;
    std::vector<std::vector<char>> out(messages), in(messages);
    std::vector<Transfer> sends(messages), receives(messages);
    for (std::size_t k = 0; k < messages; ++k) {
      const std::size_t bytes = random() % longest;
      out[k].resize(bytes), in[k].resize(bytes);
      for (std::size_t i = 0; i < bytes; ++i) {
        out[k][i] = static_cast<char>(i * 7 + k * 13 + static_cast<std::size_t>(me));
      }
      sends[k] = {out[k].data(), bytes}, receives[k] = {in[k].data(), bytes};
      total += bytes;
    }
    for (std::size_t k = 0; k < messages; ++k) {
      transport.send(1 - me, sends[k]);
      transport.receive(1 - me, receives[k]);
      if (k % 16 == 0) transport.progress();
    }
    finish(transport, sends);
    finish(transport, receives);
    for (std::size_t k = 0; k < messages; ++k) {
      for (std::size_t i = 0; i < in[k].size(); ++i) {
        CHECK(in[k][i] == static_cast<char>(i * 7 + k * 13 + static_cast<std::size_t>(1 - me)));
      }
    }
  }
  CHECK(transport.bytes_sent() == total);
}

// The links are added by a third thread while transfers may wait for them already.
void test_traffic(const std::function<Pair()>& make, std::uint64_t seed) {
  TcpTransport ranks[2];
  std::thread first([&] { talk(ranks[0], 0, seed); });
  std::thread second([&] { talk(ranks[1], 1, seed); });
  for (const int from : {0, 1}) {
    const Pair pair = make();
    ranks[from].add_outgoing(1 - from, pair[0]);
    ranks[1 - from].add_incoming(from, pair[1]);
  }
  first.join();
  second.join();
}

void test_wakes() {
  TcpTransport transport;
  const Pair pair = unix_pair();
  transport.add_incoming(3, pair[1]);
  char byte;
  Transfer receive{&byte, 1};
  transport.receive(3, receive);
  transport.wake();
  CHECK(!transport.progress());  // takes the link in, must not take the wake
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

void test_abort() {
  TcpTransport transport;
  char byte;
  Transfer receive{&byte, 1};
  transport.receive(3, receive);
  std::latch waiting(1);
  std::thread other([&] {
    waiting.wait();
    transport.abort();
  });
  const Error error = error_of([&] {
    waiting.count_down();
    for (;;) {
      if (!transport.progress()) transport.wait(kLong);
    }
  });
  CHECK(error.code() == Code::collective);
  CHECK(error_of([&] { transport.progress(); }).code() == Code::collective);
  other.join();
}

// What was sent before the end arrives; the end is an error once something is waited for, not
// before.
void test_death_of_sender(const std::function<Pair()>& make) {
  TcpTransport transport;
  const Pair pair = make();
  transport.add_incoming(5, pair[1]);
  CHECK(::write(pair[0], "abcdef", 6) == 6);
  ::close(pair[0]);
  CHECK(!transport.progress());
  std::vector<char> bytes(6);
  std::vector<Transfer> good = {{bytes.data(), 4}, {bytes.data() + 4, 2}};
  for (auto& transfer : good) transport.receive(5, transfer);
  finish(transport, good);
  CHECK(std::string(bytes.begin(), bytes.end()) == "abcdef");
  CHECK(!transport.progress());
  std::vector<Transfer> late = {{bytes.data(), 1}};
  transport.receive(5, late[0]);
  const Error error = error_of([&] { finish(transport, late); });
  CHECK(error.code() == Code::rank_failed && error.rank() == 5);
}

void test_death_of_receiver(const std::function<Pair()>& make) {
  TcpTransport transport;
  const Pair pair = make();
  transport.add_outgoing(6, pair[0]);
  std::vector<char> bytes(64u << 20);
  std::vector<Transfer> sends = {{bytes.data(), bytes.size()}};
  transport.send(6, sends[0]);
  while (!transport.progress()) transport.wait(kLong);
  CHECK(!sends[0].done);
  std::thread other([&] { ::close(pair[1]); });
  const Error error = error_of([&] { finish(transport, sends); });
  CHECK(error.code() == Code::rank_failed && error.rank() == 6);
  other.join();
}

void test_twice() {
  TcpTransport transport;
  const Pair a = unix_pair(), b = unix_pair();
  transport.add_outgoing(1, a[0]);
  transport.add_incoming(1, a[1]);
  CHECK(error_of([&] { transport.add_outgoing(1, b[0]); }).code() == Code::invalid);
  ::close(b[1]);
}

// One member of a row of allreduces of different sizes, by ring, tree and direct sending in turn.
void reduce(TcpTransport& transport, std::size_t me, std::size_t members) {
  std::vector<int> ranks;
  for (std::size_t m = 0; m < members; ++m) ranks.push_back(static_cast<int>(m));
  const std::vector<std::uint32_t> zones = {0, 1, 0, 1, 1};
  Scratch scratch;
  for (std::size_t call = 0; call < 24; ++call) {
    const Cut cut{call * call * 400 + 1, call % 2 == 0 ? 5000u : 300u, 16};
    const Program program = call % 3 == 0   ? ring_allreduce(me, members, cut)
                            : call % 3 == 1 ? tree_allreduce(me, zones, cut)
                                            : direct_allreduce(me, members, cut);
    std::vector<float> values(cut.count);
    for (std::size_t i = 0; i < cut.count; ++i)
      values[i] = static_cast<float>((i + me * call) % 16);
    const Data data{.base = reinterpret_cast<char*>(values.data()),
                    .scale = 0.5,
                    .codec = call % 4 == 3 ? Codec::fp16 : Codec::none};
    Greeting greeting{&call, sizeof call, [&](int, const void* theirs) {
                        CHECK(std::memcmp(&call, theirs, sizeof call) == 0);
                      }};
    Exchange exchange(program, ranks, transport, scratch, data, std::move(greeting));
    for (const std::uint32_t chunk : program.input_order) exchange.provide(chunk);
    while (!exchange.finished()) {
      if (!exchange.advance()) transport.wait(kLong);
    }
    for (std::size_t i = 0; i < cut.count; ++i) {
      float sum = 0;
      for (std::size_t m = 0; m < members; ++m) sum += static_cast<float>((i + m * call) % 16);
      CHECK(values[i] == sum / 2);
    }
  }
}

void test_exchanges() {
  constexpr std::size_t kMembers = 5;
  std::vector<TcpTransport> transports(kMembers);
  std::vector<std::thread> threads;
  for (std::size_t m = 0; m < kMembers; ++m) {
    threads.emplace_back([&, m] { reduce(transports[m], m, kMembers); });
  }
  for (std::size_t from = 0; from < kMembers; ++from) {
    for (std::size_t to = 0; to < kMembers; ++to) {
      if (from == to) continue;
      const Pair pair = unix_pair();
      transports[from].add_outgoing(static_cast<int>(to), pair[0]);
      transports[to].add_incoming(static_cast<int>(from), pair[1]);
    }
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace

int main() {
  for (const std::uint64_t seed : {1, 2, 3}) {
    test_traffic(unix_pair, seed);
    test_traffic(tcp_pair, seed);
  }
  test_wakes();
  test_abort();
  test_death_of_sender(unix_pair);
  test_death_of_sender(tcp_pair);
  test_death_of_receiver(unix_pair);
  test_death_of_receiver(tcp_pair);
  test_twice();
  test_exchanges();
  return 0;
}
