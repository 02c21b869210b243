// A client that reads from a node's files; the node gives them correctly, badly, or not at all.
#include "fs3/io/client/local_files.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <array>
#include <cstring>
#include <random>

#include "base/error.hpp"
#include "fs3/io/client/engine.hpp"
#include "fs3/io/client/scripted_node.hpp"

namespace ff::fs3::io {
namespace {

using namespace std::chrono_literals;
using Clock = Engine::Clock;
constexpr std::uint32_t kChain = 3;

// A local answer made from an answer with bytes: the bytes are appended to a file of the node.
struct Answer {
  Head head;
  Bytes table;
  std::vector<Place> places;
  Bytes payload;
  std::vector<int> descriptors;
};

class Files {
 public:
  Files() : file_(::memfd_create("chunks", MFD_CLOEXEC)) { CHECK(file_ >= 0); }
  ~Files() { ::close(file_); }
  int file() const { return file_; }

  Answer local(const Bytes& frame) {
    Answer answer;
    std::memcpy(&answer.head, frame.data(), sizeof answer.head);
    const auto* const table = frame.data() + sizeof answer.head;
    answer.table.assign(table, table + answer.head.table_bytes);
    const auto* payload = table + answer.head.table_bytes;
    for (std::size_t n = 0; n < answer.head.count; ++n) {
      const auto entry = at<ReadAnswer>(answer.table, n);
      end_ += 4096 - end_ % 512;
      CHECK(::pwrite(file_, payload, entry.length, static_cast<off_t>(end_)) == static_cast<ssize_t>(entry.length));
      answer.places.push_back({.position = end_, .slot = 7});
      payload += entry.length;
      end_ += entry.length;
    }
    answer.head.flags = kLocal;
    answer.head.payload_bytes = 0;
    answer.places[0].fresh = 1;
    answer.descriptors = {file_};
    return answer;
  }

 private:
  const int file_;
  std::uint64_t end_ = 0;
};

Bytes frame_of(const Answer& answer) {
  Head head = answer.head;
  head.table_bytes = static_cast<std::uint32_t>(answer.table.size() + answer.places.size() * sizeof(Place));
  Bytes frame(sizeof head + head.table_bytes);
  std::memcpy(frame.data(), &head, sizeof head);
  std::memcpy(frame.data() + sizeof head, answer.table.data(), answer.table.size());
  std::memcpy(frame.data() + sizeof head + answer.table.size(), answer.places.data(),
              answer.places.size() * sizeof(Place));
  frame.insert(frame.end(), answer.payload.begin(), answer.payload.end());
  return frame;
}

bool send(int fd, const Bytes& frame, const std::vector<int>& descriptors) {
  alignas(cmsghdr) std::array<char, CMSG_SPACE(64 * sizeof(int))> control{};
  iovec part{const_cast<std::byte*>(frame.data()), 1};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!descriptors.empty()) {
    const std::size_t bytes = descriptors.size() * sizeof(int);
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(bytes);
    cmsghdr* const first = CMSG_FIRSTHDR(&message);
    *first = {CMSG_LEN(bytes), SOL_SOCKET, SCM_RIGHTS};
    std::memcpy(CMSG_DATA(first), descriptors.data(), bytes);
  }
  if (::sendmsg(fd, &message, MSG_NOSIGNAL) != 1) return false;
  return ScriptedNode::whole(fd, Bytes(frame.begin() + 1, frame.end()));
}

struct Scene {
  explicit Scene(bool local = true)
      : engine(42, {.local = local}, [this](std::uint32_t, std::chrono::milliseconds) { return node.connect(); }) {
    const Route routes[] = {{kChain, 30, {2}}};
    engine.routing(routes, kAnyNode);
  }
  Files files;
  ScriptedNode node;
  Engine engine;  // destroyed before its node
};

Piece piece(std::uint32_t index, Bytes& memory, std::uint32_t offset = 0) {
  return {.chunk = {1, index},
          .chain = kChain,
          .offset = offset,
          .length = static_cast<std::uint32_t>(memory.size()),
          .memory = memory.data()};
}

std::size_t read(Scene& scene, std::span<Piece> pieces) { return scene.engine.read(pieces, Clock::now() + 60s); }

void pieces_of_many_shapes_are_read_from_files() {
  Scene scene;
  std::vector<Bytes> data, back;
  std::vector<Piece> reads;
  for (std::uint32_t n = 0; n < 200; ++n) {
    data.push_back(random_bytes(n % 9 == 0 ? 700'000 : 1 + n * 61 % 30'000, n));
    if (n % 11 != 0) scene.node.put({1, n}, data.back());
    else data.back().clear();
    back.emplace_back(100 + n * 37 % 40'000, std::byte{9});
  }
  for (std::uint32_t n = 0; n < 200; ++n) reads.push_back(piece(n, back[n], n * 13 % 5000));
  std::atomic<unsigned> answers = 0;
  scene.node.script([&](int fd, const ReceivedFrame& received, Bytes frame) {
    CHECK(received.head.flags == kLocal && received.head.done <= answers);
    Answer answer = scene.files.local(frame);
    if (answers++ != 0) {  // the slot holds the file already
      answer.places[0].fresh = 0;
      answer.descriptors.clear();
    }
    return send(fd, frame_of(answer), answer.descriptors);
  });
  for (int round = 0; round < 3; ++round) {
    for (Piece& piece : reads) piece.outcome = Outcome::open;
    CHECK(read(scene, reads) == 0);
    for (std::uint32_t n = 0; n < 200; ++n) {
      data[n].resize(std::max<std::size_t>(data[n].size(), reads[n].offset + back[n].size()));  // zeros
      CHECK(std::equal(back[n].begin(), back[n].end(), data[n].begin() + reads[n].offset));
    }
  }
  const auto statistics = scene.engine.statistics();
  CHECK(statistics.local_bytes == statistics.read_bytes && statistics.local_bytes != 0);
  CHECK(scene.node.connections == 1);
  Piece last{.chunk = {1, kLastIndex}, .chain = kChain};
  scene.node.script([&](int fd, const ReceivedFrame& received, Bytes frame) {
    CHECK(received.head.done == answers);  // any frame carries the count
    return ScriptedNode::whole(fd, frame);
  });
  CHECK(scene.engine.query_last({&last, 1}, Clock::now() + 60s) == 0);
}

void what_is_against_the_rules_costs_the_connection() {
  using Change = std::function<void(Answer&)>;
  const Change changes[] = {
      [](Answer& a) { a.descriptors.clear(); },
      [](Answer& a) { a.descriptors.push_back(a.descriptors[0]); },
      [](Answer& a) { a.descriptors.assign(40, a.descriptors[0]); },  // more than there are slots
      [](Answer& a) { a.places[0].fresh = 0; },
      [](Answer& a) { a.places[0].fresh = 2; },
      [](Answer& a) { a.places[1].slot = 8; },  // an empty slot
      [](Answer& a) { a.places[1].slot = kLocalSlots; },
      [](Answer& a) { a.places[1].fresh = 1; },  // but there is only one descriptor
      [](Answer& a) { a.places[0].position = ~std::uint64_t{0}; },
      [](Answer& a) { a.places.pop_back(); },
      [](Answer& a) { a.places.push_back(a.places[0]); },
      [](Answer& a) {  // bytes in addition
        a.head.payload_bytes = 8192;
        a.payload.resize(8192);
      },
      [](Answer& a) {  // no local answer, but it carries a descriptor
        a.head.flags = 0;
        a.head.payload_bytes = 8192;
        a.places.clear();
        a.payload.resize(8192);
      },
  };
  const Bytes good = random_bytes(4096, 1);
  for (const Change& change : changes) {
    Scene scene;
    scene.node.put({1, 0}, good);
    scene.node.put({1, 1}, good);
    scene.node.script([&](int fd, const ReceivedFrame& received, Bytes frame) {
      CHECK(received.head.flags == kLocal);
      Answer answer = scene.files.local(frame);
      change(answer);
      return send(fd, frame_of(answer), answer.descriptors);
    });
    Bytes a(4096), b(4096);
    Piece reads[] = {piece(0, a), piece(1, b)};
    CHECK(read(scene, reads) == 2 && reads[0].outcome == Outcome::lost && reads[1].outcome == Outcome::lost);
    scene.node.script(nullptr);  // answers with bytes work as well
    reads[1].outcome = Outcome::open;
    CHECK(read(scene, reads) == 1 && b == good && scene.node.connections == 2);
  }
}

void a_client_that_did_not_ask_rejects_a_local_answer() {
  Scene scene(false);
  scene.node.put({1, 0}, random_bytes(4096, 1));
  scene.node.script([&](int fd, const ReceivedFrame& received, Bytes frame) {
    CHECK(received.head.flags == 0);
    const Answer answer = scene.files.local(frame);
    return send(fd, frame_of(answer), answer.descriptors);
  });
  Bytes back(4096);
  Piece one = piece(0, back);
  CHECK(read(scene, {&one, 1}) == 1 && one.outcome == Outcome::lost);
}

void wrong_bytes_of_files_are_found_and_reported() {
  Scene scene;
  scene.node.put({1, 0}, random_bytes(50'000, 1));
  const auto read_from = [&](const std::function<void(Answer&)>& change) {
    scene.node.script([&](int fd, const ReceivedFrame& received, Bytes frame) {
      if (received.head.kind != FrameKind::read) return ScriptedNode::whole(fd, frame);
      Answer answer = scene.files.local(frame);
      change(answer);
      return send(fd, frame_of(answer), answer.descriptors);
    });
    Bytes back(50'000);
    Piece one = piece(0, back);
    return read(scene, {&one, 1}) == 0 ? Outcome::ok : one.outcome;
  };
  CHECK(read_from([](Answer&) {}) == Outcome::ok);
  CHECK(read_from([&](Answer& answer) {
          const auto at = static_cast<off_t>(answer.places[0].position + 33'333);
          std::byte byte;
          CHECK(::pread(scene.files.file(), &byte, 1, at) == 1);
          byte ^= std::byte{1};
          CHECK(::pwrite(scene.files.file(), &byte, 1, at) == 1);
        }) == Outcome::mismatch);
  CHECK(read_from([](Answer& answer) { answer.places[0].position += 1 << 20; }) ==
        Outcome::mismatch);  // beyond the end
  int ends[2];
  CHECK(::pipe2(ends, O_CLOEXEC) == 0);  // not a file
  CHECK(read_from([&](Answer& answer) { answer.descriptors = {ends[1]}; }) == Outcome::mismatch);
  ::close(ends[0]);
  ::close(ends[1]);
  CHECK(scene.engine.statistics().mismatches == 3 && scene.node.connections == 1);
  Piece last{.chunk = {1, kLastIndex}, .chain = kChain};
  CHECK(scene.engine.query_last({&last, 1}, Clock::now() + 60s) == 0 && scene.node.reports == 3);
}

// Several threads read the large pieces of one answer; each piece gets its bytes and its outcome.
void large_pieces_are_read_side_by_side() {
  constexpr std::uint32_t kPieces = 6, kBad = 3;
  Scene scene;
  std::vector<Bytes> data, back;
  std::vector<Piece> reads;
  for (std::uint32_t n = 0; n < kPieces; ++n) {
    data.push_back(random_bytes((1 << 20) + 8192 + n, n));
    scene.node.put({1, n}, data.back());
    back.emplace_back((1 << 20) + 4096);
  }
  for (std::uint32_t n = 0; n < kPieces; ++n) reads.push_back(piece(n, back[n], n * 700));
  scene.node.script([&](int fd, const ReceivedFrame& received, Bytes frame) {
    if (received.head.kind != FrameKind::read) return ScriptedNode::whole(fd, frame);
    const Answer answer = scene.files.local(frame);
    for (const Place& place : answer.places) {
      std::array<std::byte, 16> begin;
      CHECK(::pread(scene.files.file(), begin.data(), 16, static_cast<off_t>(place.position)) == 16);
      if (!std::equal(begin.begin(), begin.end(), data[kBad].begin())) continue;
      begin[0] ^= std::byte{1};
      CHECK(::pwrite(scene.files.file(), begin.data(), 1, static_cast<off_t>(place.position)) == 1);
    }
    return send(fd, frame_of(answer), answer.descriptors);
  });
  CHECK(read(scene, reads) == 1);
  for (std::uint32_t n = 0; n < kPieces; ++n) {
    CHECK(reads[n].outcome == (n == kBad ? Outcome::mismatch : Outcome::ok));
    if (n != kBad) CHECK(std::equal(back[n].begin(), back[n].begin() + 4096, data[n].begin() + reads[n].offset));
    if (n != kBad)
      CHECK(std::equal(back[n].end() - 4096, back[n].end(), data[n].begin() + reads[n].offset + (1 << 20)));
  }
}

void a_process_without_descriptors_gets_bytes() {
  Scene scene;
  const Bytes good = random_bytes(10'000, 2);
  scene.node.put({1, 0}, good);
  scene.node.script([&](int fd, const ReceivedFrame& received, Bytes frame) {
    if (received.head.flags != kLocal) return ScriptedNode::whole(fd, frame);
    const Answer answer = scene.files.local(frame);
    return send(fd, frame_of(answer), answer.descriptors);
  });
  Piece last{.chunk = {1, kLastIndex}, .chain = kChain};
  CHECK(scene.engine.query_last({&last, 1}, Clock::now() + 60s) == 0);  // connected
  rlimit before;
  CHECK(::getrlimit(RLIMIT_NOFILE, &before) == 0);
  const int free = ::dup(0);
  CHECK(free >= 0 && ::close(free) == 0);
  const rlimit none{static_cast<rlim_t>(free), before.rlim_max};
  CHECK(::setrlimit(RLIMIT_NOFILE, &none) == 0);
  Bytes back(10'000);
  Piece one = piece(0, back);
  CHECK(read(scene, {&one, 1}) == 1 && one.outcome == Outcome::lost);
  CHECK(::setrlimit(RLIMIT_NOFILE, &before) == 0);
  one.outcome = Outcome::open;
  CHECK(read(scene, {&one, 1}) == 0 && back == good);
  CHECK(scene.engine.statistics().local_bytes == 0 && scene.node.connections == 2);
}

void damaged_frames_bring_no_wrong_bytes() {
  Scene scene;
  const Bytes good = random_bytes(20'000, 5);
  for (std::uint32_t n = 0; n < 3; ++n) scene.node.put({1, n}, good);
  std::mt19937_64 random(7);
  scene.node.script([&](int fd, const ReceivedFrame& received, Bytes frame) {
    if (received.head.kind != FrameKind::read) return false;
    Answer answer = scene.files.local(frame);
    answer.places[2].fresh = static_cast<std::uint8_t>(random() % 2);
    if (random() % 2 != 0) answer.descriptors.push_back(scene.files.file());
    Bytes bad = frame_of(answer);
    for (std::uint64_t left = 1 + random() % 4; left != 0; --left)
      bad[random() % bad.size()] ^= static_cast<std::byte>(1 + random() % 255);
    if (random() % 4 == 0) bad.resize(1 + random() % bad.size());
    CHECK(send(fd, bad, answer.descriptors));
    return false;
  });
  for (int round = 0; round < 2000; ++round) {
    Bytes a(5000), b(20'000), c(100);
    Piece reads[] = {piece(0, a, 100), piece(1, b), piece(2, c, 19'000)};
    read(scene, reads);
    for (const Piece& one : reads) {
      CHECK(one.outcome != Outcome::open && one.outcome != Outcome::late);
      if (one.outcome != Outcome::ok || one.chunk_length != good.size()) continue;  // lengths have no CRC
      CHECK(std::equal(one.memory, one.memory + one.length, good.begin() + one.offset));
    }
  }
}

}  // namespace
}  // namespace ff::fs3::io

int main() {
  using namespace ff::fs3::io;
  pieces_of_many_shapes_are_read_from_files();
  what_is_against_the_rules_costs_the_connection();
  a_client_that_did_not_ask_rejects_a_local_answer();
  wrong_bytes_of_files_are_found_and_reported();
  large_pieces_are_read_side_by_side();
  a_process_without_descriptors_gets_bytes();
  damaged_frames_bring_no_wrong_bytes();
}
