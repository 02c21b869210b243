// The socket transport between threads: content and order, late links, wakes, abort, and the death
// of a peer.
#include "hfreduce/transport/tcp.hpp"

#include <latch>
#include <thread>

#include "hfreduce/transport/transport_scenes.hpp"

using namespace ff;
using namespace ff::hfreduce;
using namespace ff::hfreduce::scenes;

namespace {

void test_wakes() {
  TcpTransport transport;
  const Pair pair = unix_pair();
  transport.add_incoming(3, pair[1]);
  char byte;
  Transfer receive{&byte, 1};
  transport.receive(3, receive);
  transport.wake();
  CHECK(!transport.progress());  // adopts the link, must not consume the wake
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

// Bytes that were sent before the end of the stream arrive. The end is an error only for a receive of further bytes.
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
    test_traffic<TcpTransport>(unix_pair, seed);
    test_traffic<TcpTransport>(tcp_pair, seed);
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
