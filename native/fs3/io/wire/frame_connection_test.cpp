// Frames over a socket pair, in steps of any size; answers from memory and files; input that breaks a connection.
#include "fs3/io/wire/frame_connection.hpp"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>

#include "base/testing/check.hpp"

using namespace ff::fs3::io;

namespace {

struct Pair {
  int ours = -1, theirs = -1;
  Pair() {
    int both[2];
    CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, both) == 0);
    ours = both[0];
    theirs = both[1];
    CHECK(::fcntl(ours, F_SETFL, O_NONBLOCK) == 0);
  }
  ~Pair() { ::close(theirs); }
};

std::vector<std::byte> random_bytes(std::mt19937& random, std::size_t count) {
  std::vector<std::byte> bytes(count);
  for (auto& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

void write_all(int fd, const void* from, std::size_t bytes) {
  const auto* at = static_cast<const char*>(from);
  while (bytes > 0) {
    const ssize_t done = ::write(fd, at, bytes);
    CHECK(done > 0);
    at += done;
    bytes -= static_cast<std::size_t>(done);
  }
}

// Returns the bytes of a WRITE frame. Its table is random, because a FrameConnection does not parse tables.
std::vector<std::byte> frame_of(std::mt19937& random, std::size_t payload, std::uint64_t request) {
  Head head;
  head.kind = FrameKind::write;
  head.count = 1;
  head.table_bytes = sizeof(WriteEntry) + 4 * static_cast<std::uint32_t>(random() % 50);
  head.payload_bytes = payload;
  head.request = request;
  std::vector<std::byte> bytes(sizeof head);
  std::memcpy(bytes.data(), &head, sizeof head);
  const auto rest = random_bytes(random, head.table_bytes + payload);
  bytes.insert(bytes.end(), rest.begin(), rest.end());
  return bytes;
}

void frames_arrive_whole_in_order_whatever_the_pieces() {
  for (unsigned seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    Pool pool(std::size_t{64} << 20);
    Pair pair;
    FrameConnection line(pair.ours, [&](const Head&) -> Pool& { return pool; });
    std::vector<std::byte> stream;
    std::vector<std::size_t> begins;
    for (std::uint64_t n = 0; n < 30; ++n) {
      begins.push_back(stream.size());
      const auto one = frame_of(random, random() % 3 == 0 ? random() % 300'000 : random() % 100, n);
      stream.insert(stream.end(), one.begin(), one.end());
    }
    begins.push_back(stream.size());
    std::thread writer([&] {
      std::mt19937 cuts(seed + 1000);
      for (std::size_t at = 0; at < stream.size();) {
        const std::size_t step =
            std::min<std::size_t>(stream.size() - at, cuts() % 4 == 0 ? 1 + cuts() % 100'000 : 1 + cuts() % 60);
        write_all(pair.theirs, stream.data() + at, step);
        at += step;
      }
    });
    for (std::size_t n = 0; n < 30;) {
      Frame frame;
      const auto got = line.receive(frame);
      CHECK(got == FrameConnection::Got::frame || got == FrameConnection::Got::nothing);
      if (got == FrameConnection::Got::nothing) continue;
      CHECK(frame.head.request == n);
      const std::byte* table = stream.data() + begins[n] + sizeof(Head);
      CHECK(std::memcmp(frame.table.data(), table, frame.table.size()) == 0);
      CHECK(begins[n] + sizeof(Head) + frame.table.size() + frame.head.payload_bytes == begins[n + 1]);
      if (frame.head.payload_bytes != 0) {
        CHECK(std::memcmp(frame.payload.data(), table + frame.table.size(), frame.head.payload_bytes) == 0);
      }
      ++n;
    }
    writer.join();
    CHECK(pool.out() == 0);
  }
}

void what_is_no_frame_breaks_the_line() {
  std::mt19937 random(7);
  for (int n = 0; n < 2000; ++n) {
    Pool pool(std::size_t{1} << 20);
    Pair pair;
    FrameConnection line(pair.ours, [&](const Head&) -> Pool& { return pool; });
    auto bytes = frame_of(random, 10, 1);
    if (n % 2 == 0) bytes[random() % 16] ^= static_cast<std::byte>(1 + random() % 255);
    else bytes.resize(1 + random() % (bytes.size() - 1));
    write_all(pair.theirs, bytes.data(), bytes.size());
    ::shutdown(pair.theirs, SHUT_WR);
    Frame frame;
    auto got = line.receive(frame);
    if (got == FrameConnection::Got::frame) got = line.receive(frame);  // a flag or a count that is allowed
    CHECK(got == FrameConnection::Got::broken && line.broken());
    CHECK(line.flush());
  }
}

void a_line_without_memory_goes_on_when_there_is_some() {
  std::mt19937 random(3);
  Pool pool(100'000);
  auto held = pool.take(90'000);
  CHECK(held && !pool.take(90'000));
  Pair pair;
  FrameConnection line(pair.ours, [&](const Head&) -> Pool& { return pool; });
  const auto bytes = frame_of(random, 80'000, 5);
  std::thread writer([&] { write_all(pair.theirs, bytes.data(), bytes.size()); });
  Frame frame;
  FrameConnection::Got got;
  while ((got = line.receive(frame)) == FrameConnection::Got::nothing) {
  }
  CHECK(got == FrameConnection::Got::starved && &line.starved_pool() == &pool);
  bool told = false;
  pool.when_free([&] { told = true; });
  CHECK(!told);
  held = {};
  CHECK(told);
  while ((got = line.receive(frame)) == FrameConnection::Got::nothing) {
  }
  CHECK(got == FrameConnection::Got::frame && frame.head.request == 5);
  writer.join();
}

void answers_of_memory_and_files_leave_in_order() {
  std::string name = "/tmp/line_test_XXXXXX";
  const int file = ::mkstemp(name.data());
  CHECK(file >= 0 && ::unlink(name.c_str()) == 0);
  std::mt19937 random(11);
  const auto stored = random_bytes(random, 700'000);
  write_all(file, stored.data(), stored.size());
  Pool pool(1);
  Pair pair;
  FrameConnection line(pair.ours, [&](const Head&) -> Pool& { return pool; });
  std::vector<std::byte> expected;
  auto alive = std::make_shared<int>(0);
  for (int n = 0; n < 40; ++n) {
    Outgoing outgoing;
    outgoing.table = random_bytes(random, 1 + random() % 5000);
    outgoing.add(outgoing.table.data(), outgoing.table.size());
    expected.insert(expected.end(), outgoing.table.begin(), outgoing.table.end());
    if (n % 2 == 0) {
      const std::size_t from = random() % 800'000, bytes = random() % 200'000;  // perhaps beyond the end: zeros
      outgoing.add_file(file, from, bytes);
      for (std::size_t at = from; at < from + bytes; ++at) {
        expected.push_back(at < stored.size() ? stored[at] : std::byte{0});
      }
    }
    outgoing.holds.push_back(alive);
    line.send(std::move(outgoing));
  }
  CHECK(line.waiting() == expected.size() && alive.use_count() > 1);
  std::vector<std::byte> found(expected.size());
  std::size_t at = 0;
  while (at < found.size()) {
    line.flush();
    const ssize_t got = ::read(pair.theirs, found.data() + at, std::min<std::size_t>(found.size() - at, 30'000));
    CHECK(got > 0);
    at += static_cast<std::size_t>(got);
  }
  CHECK(found == expected && line.flush() && line.waiting() == 0 && alive.use_count() == 1);
  ::close(file);
}

void a_peer_that_goes_frees_what_waits() {
  Pool pool(1);
  auto pair = std::make_unique<Pair>();
  FrameConnection line(pair->ours, [&](const Head&) -> Pool& { return pool; });
  auto alive = std::make_shared<int>(0);
  Outgoing outgoing;
  outgoing.table.resize(4 << 20);
  outgoing.add(outgoing.table.data(), outgoing.table.size());
  outgoing.holds.push_back(alive);
  line.send(std::move(outgoing));
  CHECK(!line.flush() && alive.use_count() == 2);
  pair.reset();
  line.flush();
  CHECK(line.broken() && alive.use_count() == 1 && line.waiting() == 0);
}

// The peer may have all bytes before the sending thread has noted that they are sent.
void a_peer_that_took_all_keeps_the_connection_when_holders_are_dropped() {
  Pool pool(1);
  Pair pair;
  FrameConnection line(pair.ours, [&](const Head&) -> Pool& { return pool; });
  const auto queue = [&](const std::shared_ptr<int>& held) {
    Outgoing outgoing;
    outgoing.table.resize(9);
    outgoing.add(outgoing.table.data(), outgoing.table.size());
    outgoing.holds.push_back(held);
    line.send(std::move(outgoing));
  };
  std::array<std::byte, 9> bytes;
  const auto take = [&] { CHECK(::read(pair.theirs, bytes.data(), bytes.size()) == 9); };
  const auto held = std::make_shared<int>(0);
  queue(held);  // no thread sends it yet
  line.drop_holders();
  CHECK(!line.broken() && held.use_count() == 1);
  take();
  for (int n = 0; n < 2000; ++n) {
    queue(held);
    std::thread sender([&] { line.flush(); });
    take();
    line.drop_holders();
    CHECK(!line.broken() && held.use_count() == 1);
    sender.join();
  }
}

void a_slow_peer_loses_the_connection_when_holders_are_dropped() {
  Pool pool(1);
  Pair pair;
  FrameConnection line(pair.ours, [&](const Head&) -> Pool& { return pool; });
  const auto held = std::make_shared<int>(0);
  Outgoing outgoing;
  outgoing.table.resize(4 << 20);
  outgoing.add(outgoing.table.data(), outgoing.table.size());
  outgoing.holds.push_back(held);
  line.send(std::move(outgoing));
  line.drop_holders();
  CHECK(line.broken() && held.use_count() == 1);
}

}  // namespace

int main() {
  frames_arrive_whole_in_order_whatever_the_pieces();
  what_is_no_frame_breaks_the_line();
  a_line_without_memory_goes_on_when_there_is_some();
  answers_of_memory_and_files_leave_in_order();
  a_peer_that_goes_frees_what_waits();
  a_peer_that_took_all_keeps_the_connection_when_holders_are_dropped();
  a_slow_peer_loses_the_connection_when_holders_are_dropped();
}
