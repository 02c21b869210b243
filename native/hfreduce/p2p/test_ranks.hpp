// Shared by the tests of P2PEngine: worlds of ranks that are threads of this process, and checks of operations' outcomes.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "base/testing/check.hpp"
#include "base/testing/test_bytes.hpp"
#include "hfreduce/p2p/p2p_engine.hpp"

namespace ff::hfreduce::test {

using Posts = std::vector<std::unique_ptr<P2PEngine>>;
using OperationPtr = std::shared_ptr<Operation>;
using Bytes = std::vector<char>;

inline constexpr double kNoDeadline = 0;

inline void socket_pair(bool tcp, int ends[2]) {
  if (!tcp) {
    CHECK(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    return;
  }
  const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  auto* place = reinterpret_cast<sockaddr*>(&address);
  socklen_t length = sizeof address;
  CHECK(::bind(listener, place, length) == 0 && ::listen(listener, 1) == 0);
  CHECK(::getsockname(listener, place, &length) == 0);
  ends[0] = ::socket(AF_INET, SOCK_STREAM, 0);
  CHECK(::connect(ends[0], place, length) == 0);
  ends[1] = ::accept(listener, nullptr, nullptr);
  CHECK(ends[1] >= 0);
  ::close(listener);
}

inline void link(Posts& posts, int from, int to, bool tcp, bool local = false) {
  int ends[2];
  socket_pair(tcp, ends);
  posts[static_cast<std::size_t>(from)]->add_outgoing(to, ends[0], local);
  posts[static_cast<std::size_t>(to)]->add_incoming(from, ends[1]);
}

inline Posts make_world(int world, bool tcp = false, bool linked = true, bool local = false) {
  Posts posts;
  for (int r = 0; r < world; ++r) posts.push_back(std::make_unique<P2PEngine>(r, world));
  for (int from = 0; linked && from < world; ++from) {
    for (int to = 0; to < world; ++to) {
      if (from != to) link(posts, from, to, tcp, local);
    }
  }
  return posts;
}

inline Bytes pattern(std::size_t bytes, std::uint64_t seed) {
  Bytes data(bytes);
  fill_steps(data.data(), bytes, 31, seed);
  return data;
}

inline void expect_ok(P2PEngine& post, const OperationPtr& operation) {
  CHECK(post.wait(*operation, -1));
  operation->rethrow();
}

inline std::string expect_error(P2PEngine& post, const OperationPtr& operation, Code code, int rank = -1) {
  CHECK(post.wait(*operation, -1));
  try {
    operation->rethrow();
  } catch (const Error& error) {
    if (error.code() == code && error.rank() == rank) return error.what();
    std::fprintf(stderr, "unexpected: %s\n", error.what());
  }
  CHECK(false);
  return {};
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace ff::hfreduce::test
