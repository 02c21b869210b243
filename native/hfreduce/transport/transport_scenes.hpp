// Shared by the tests of transports: pairs of sockets, and ranks that exchange messages.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "base/testing/check.hpp"
#include "base/testing/test_bytes.hpp"
#include "hfreduce/schedule/exchange.hpp"
#include "hfreduce/transport/transport.hpp"

namespace ff::hfreduce::scenes {

using std::chrono::milliseconds;

constexpr milliseconds kLong{60'000};

using Pair = std::array<int, 2>;

inline Pair unix_pair() {
  Pair pair;
  CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair.data()) == 0);
  return pair;
}

inline Pair tcp_pair() {
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

inline void finish(Transport& transport, std::vector<Transfer>& transfers) {
  for (auto& transfer : transfers) {
    while (!transfer.done) {
      if (!transport.progress()) transport.wait(kLong);
    }
  }
}

// Returns the error that `action` ends with.
inline Error error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error;
  }
  CHECK(!"an error was expected");
  std::abort();
}

// Maximum bytes of a message; less under the thread sanitizer, which slows memory accesses down. A system call of the TCP
// transport takes at most 32 messages and about 1 MiB: the messages must be long enough to reach the second limit, too.
constexpr std::size_t kTalk = FF_THREAD_SANITIZER ? 70'000 : 200'000;

// Runs one of two ranks that send each other messages of the same random sizes.
inline void talk(Transport& transport, int me, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::uint64_t total = 0;
  for (int round = 0; round < 20; ++round) {
    const std::size_t messages = 1 + random() % 100;
    const std::size_t longest = random() % 3 == 0 ? kTalk : 300;
    std::vector<std::vector<char>> out(messages), in(messages);
    std::vector<Transfer> sends(messages), receives(messages);
    for (std::size_t k = 0; k < messages; ++k) {
      const std::size_t bytes = random() % longest;
      out[k].resize(bytes), in[k].resize(bytes);
      fill_steps(out[k].data(), bytes, 7, k * 13 + static_cast<std::size_t>(me));
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
      std::vector<char> wanted(in[k].size());
      fill_steps(wanted.data(), wanted.size(), 7, k * 13 + static_cast<std::size_t>(1 - me));
      CHECK(in[k] == wanted);
    }
  }
  CHECK(transport.bytes_sent() == total);
}

// Runs one member in a sequence of allreduces of different sizes, by the ring, tree and direct algorithms in turn.
inline void reduce(Transport& transport, std::size_t me, std::size_t members) {
  std::vector<int> ranks;
  for (std::size_t m = 0; m < members; ++m) ranks.push_back(static_cast<int>(m));
  std::vector<std::uint32_t> zones = {0, 1, 0, 1, 1};
  CHECK(members <= zones.size());
  zones.resize(members);
  Scratch scratch;
  for (std::size_t call = 0; call < 24; ++call) {
    const Cut cut{call * call * 400 + 1, call % 2 == 0 ? 5000u : 300u, 16};
    const Program program = call % 3 == 0   ? ring_allreduce(me, members, cut)
                            : call % 3 == 1 ? tree_allreduce(me, zones, cut)
                                            : direct_allreduce(me, members, cut);
    std::vector<float> values(cut.count);
    for (std::size_t i = 0; i < cut.count; ++i) values[i] = static_cast<float>((i + me * call) % 16);
    const Data data{.base = reinterpret_cast<char*>(values.data()),
                    .scale = 0.5,
                    .codec = call % 4 == 3 ? Codec::fp16 : Codec::none};
    Handshake handshake{&call, sizeof call,
                        [&](int, const void* theirs) { CHECK(std::memcmp(&call, theirs, sizeof call) == 0); }};
    Exchange exchange(program, ranks, transport, scratch, data, std::move(handshake));
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

// A third thread adds the links while transfers may already wait for them.
template <class Linked>
void test_traffic(const std::function<Pair()>& make, std::uint64_t seed) {
  Linked ranks[2];
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

}  // namespace ff::hfreduce::scenes
