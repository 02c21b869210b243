// The engine against nodes that answer correctly, badly or not at all.
#include "fs3/io/client/engine.hpp"

#include <array>
#include <cstring>
#include <thread>

#include "base/error.hpp"
#include "base/testing/check.hpp"
#include "fs3/io/client/scripted_node.hpp"

namespace ff::fs3::io {
namespace {

using namespace std::chrono_literals;
using Clock = Engine::Clock;

Clock::time_point soon() { return Clock::now() + 60s; }

struct Scene {
  explicit Scene(EngineOptions options = {}, std::uint32_t local = kAnyNode)
      : engine(42, options, [this](std::uint32_t node, std::chrono::milliseconds) {
          if (node == down) throw Error(Code::peer_lost, "nobody listens");
          return nodes[node].connect();
        }) {
    // Chain 1 is on nodes 0 and 1, chain 2 on 1 and 2, chain 3 on 2, chain 4 on no node.
    const Route routes[] = {{1, 10, {0, 1}}, {2, 20, {1, 2}}, {3, 30, {2}}, {4, 40, {}}};
    engine.routing(routes, local);
  }
  std::array<ScriptedNode, 3> nodes;
  std::atomic<std::uint32_t> down = 99;
  Engine engine;  // destroyed before its nodes
};

Piece piece(std::uint64_t inode, std::uint32_t index, std::uint32_t chain, Bytes& memory, std::uint32_t offset = 0) {
  return {.chunk = {inode, index},
          .chain = chain,
          .offset = offset,
          .length = static_cast<std::uint32_t>(memory.size()),
          .memory = memory.data()};
}

void bytes_come_back_as_they_were_written() {
  Scene scene;
  std::vector<Bytes> data, back;
  std::vector<Piece> writes, reads;
  for (std::uint32_t n = 0; n < 300; ++n) {
    data.push_back(random_bytes(n % 7 == 0 ? 100'000 : 1 + n * 37 % 9000, n));
    back.emplace_back(data.back().size());
  }
  for (std::uint32_t n = 0; n < 300; ++n) {
    writes.push_back(piece(9, n, 3, data[n], n));
    reads.push_back(piece(9, n, 3, back[n], n));
  }
  CHECK(scene.engine.write(writes, soon()) == 0);
  CHECK(scene.engine.read(reads, soon()) == 0);
  CHECK(data == back);
  CHECK(scene.nodes[2].frames < 40);  // a batch travels in few frames
  for (const Piece& write : writes) CHECK(write.outcome == Outcome::ok && write.channel == 0 && write.asked == 2);
}

void writes_go_to_the_head_and_reads_to_any() {
  Scene scene;
  Bytes bytes = random_bytes(5000, 1);
  for (auto& node : scene.nodes) node.put({1, 0}, bytes);
  std::vector<Bytes> back(64, Bytes(5000));
  std::vector<Piece> reads;
  for (Bytes& to : back) reads.push_back(piece(1, 0, 1, to));
  CHECK(scene.engine.read(reads, soon()) == 0);
  std::array<unsigned, 3> asked{};
  for (const Piece& read : reads) ++asked[read.asked];
  CHECK(asked[0] > 20 && asked[1] > 20 && asked[2] == 0);
  Piece write = piece(1, 0, 2, bytes);
  CHECK(scene.engine.write({&write, 1}, soon()) == 0 && write.asked == 1);
  Piece read = piece(1, 0, 2, back[0]);
  read.choice = 2;
  CHECK(scene.engine.read({&read, 1}, soon()) == 0 && read.asked == 2);

  Scene near({}, 1);
  near.nodes[1].put({1, 0}, bytes);
  for (Piece& again : reads) again.outcome = Outcome::open;
  CHECK(near.engine.read(reads, soon()) == 0);
  for (const Piece& again : reads) CHECK(again.asked == 1);
}

void what_cannot_be_routed_or_reached_is_told_for_each() {
  Scene scene;
  scene.down = 2;
  Bytes bytes(100), a(100), b(100), c(100), d(100);
  scene.nodes[0].put({1, 0}, bytes);
  Piece pieces[] = {piece(1, 0, 1, a), piece(1, 0, 3, b), piece(1, 0, 4, c), piece(1, 0, 5, d)};
  pieces[0].choice = 0;
  CHECK(scene.engine.read(pieces, soon()) == 3);
  CHECK(pieces[0].outcome == Outcome::ok && pieces[1].outcome == Outcome::unreachable);
  CHECK(pieces[2].outcome == Outcome::no_route && pieces[3].outcome == Outcome::no_route);
}

void wrong_bytes_are_found_reported_and_read_elsewhere() {
  Scene scene;
  const Bytes good = random_bytes(300'000, 4);
  for (auto& node : scene.nodes) node.put({1, 0}, good);
  scene.nodes[0].script([](int fd, const ReceivedFrame& received, Bytes answer) {
    if (received.head.kind == FrameKind::read) answer[answer.size() - 50'000] ^= std::byte{1};
    return ScriptedNode::whole(fd, answer);
  });
  Bytes back(300'000);
  Piece read = piece(1, 0, 1, back);
  read.choice = 0;
  CHECK(scene.engine.read({&read, 1}, soon()) == 1 && read.outcome == Outcome::mismatch);
  CHECK(scene.engine.statistics().mismatches == 1);
  read.outcome = Outcome::open;
  read.choice = 1;
  CHECK(scene.engine.read({&read, 1}, soon()) == 0 && back == good);
  Piece last{.chunk = {1, kLastIndex}, .chain = 1, .choice = 0};  // on the same connection, behind the report
  CHECK(scene.engine.query_last({&last, 1}, soon()) == 0 && last.chunk_length == 300'000);
  CHECK(scene.nodes[0].reports == 1 && scene.nodes[0].connections == 1);
}

// Each kind of damage to an answer costs only the connection on which the answer came.
void a_broken_answer_loses_its_pieces_and_no_more() {
  const ScriptedNode::Script scripts[] = {
      [](int, const ReceivedFrame&, Bytes) { return false; },  // dies instead of answering
      [](int fd, const ReceivedFrame&, Bytes answer) {         // cut in the head, in the table, in mid-payload
        answer.resize(20);
        return ScriptedNode::whole(fd, answer) && false;
      },
      [](int fd, const ReceivedFrame&, Bytes answer) {
        answer.resize(sizeof(Head) + 10);
        return ScriptedNode::whole(fd, answer) && false;
      },
      [](int fd, const ReceivedFrame&, Bytes answer) {
        answer.resize(answer.size() - 30'001);
        return ScriptedNode::whole(fd, answer) && false;
      },
      [](int fd, const ReceivedFrame&, Bytes) { return ScriptedNode::whole(fd, random_bytes(5000, 6)); },  // garbage
      [](int fd, const ReceivedFrame&, Bytes answer) {  // the answer to another request
        answer[offsetof(Head, request)] ^= std::byte{0x40};
        return ScriptedNode::whole(fd, answer);
      },
      [](int fd, const ReceivedFrame&, Bytes answer) {  // an answer of another kind
        answer[offsetof(Head, kind)] = static_cast<std::byte>(FrameKind::read);
        return ScriptedNode::whole(fd, answer);
      },
      [](int fd, const ReceivedFrame&, Bytes answer) {  // sizes beyond all limits
        answer[offsetof(Head, table_bytes) + 3] = std::byte{0x7f};
        return ScriptedNode::whole(fd, answer);
      },
      [](int fd, const ReceivedFrame&, Bytes answer) {
        answer[offsetof(Head, payload_bytes)] ^= std::byte{1};
        return ScriptedNode::whole(fd, answer);
      },
      [](int fd, const ReceivedFrame&, Bytes answer) {  // more CRCs than bytes
        answer[sizeof(Head) + offsetof(ReadAnswer, crcs)] ^= std::byte{1};
        return ScriptedNode::whole(fd, answer);
      },
  };
  const Bytes good = random_bytes(80'000, 8);
  for (const auto& script : scripts) {
    Scene scene;
    for (auto& node : scene.nodes) node.put({1, 0}, good);
    scene.nodes[0].script(script);
    Bytes a(80'000), b(80'000);
    Piece pieces[] = {piece(1, 0, 1, a), piece(1, 0, 1, b)};
    pieces[0].choice = 0;
    pieces[1].choice = 1;
    CHECK(scene.engine.read(pieces, soon()) == 1);
    CHECK(pieces[0].outcome == Outcome::lost && pieces[1].outcome == Outcome::ok && b == good);
    scene.nodes[0].script({});
    pieces[0].outcome = Outcome::open;
    CHECK(scene.engine.read(pieces, soon()) == 0 && a == good);
  }
}

void short_reads_and_writes_are_put_together() {
  Scene scene;
  const Bytes good = random_bytes(70'000, 2);
  scene.nodes[2].put({1, 0}, good);
  scene.nodes[2].script([](int fd, const ReceivedFrame&, Bytes answer) {
    for (std::size_t at = 0, step = 1; at < answer.size(); at += step, step = step * 5 % 4099 + 1) {
      const Bytes part(answer.begin() + static_cast<std::ptrdiff_t>(at),
                       answer.begin() + static_cast<std::ptrdiff_t>(std::min(at + step, answer.size())));
      if (!ScriptedNode::whole(fd, part)) return false;
    }
    return true;
  });
  std::vector<Bytes> back(5, Bytes(30'000));
  std::vector<Piece> reads;
  for (std::uint32_t n = 0; n < 5; ++n) reads.push_back(piece(1, 0, 3, back[n], n * 10'001));
  CHECK(scene.engine.read(reads, soon()) == 0);
  for (std::size_t n = 0; n < 5; ++n) {
    for (std::size_t k = 0; k < 30'000; ++k) {
      const std::size_t from = n * 10'001 + k;
      CHECK(back[n][k] == (from < good.size() ? good[from] : std::byte{0}));
    }
  }
}

void a_write_whose_outcome_is_not_known_keeps_its_tag() {
  Scene scene;
  scene.nodes[2].script([](int, const ReceivedFrame&, Bytes) { return false; });  // done, but the answer is lost
  Bytes bytes = random_bytes(10'000, 1);
  Piece first = piece(1, 0, 3, bytes, 5);
  CHECK(scene.engine.write({&first, 1}, soon()) == 1 && first.outcome == Outcome::lost && first.channel != 0);
  scene.nodes[2].script({});
  Piece other = piece(1, 1, 3, bytes);
  CHECK(scene.engine.write({&other, 1}, soon()) == 0 && other.channel == 0);
  first.outcome = Outcome::open;
  CHECK(scene.engine.write({&first, 1}, soon()) == 0 && first.channel == 0);
  Piece third = piece(1, 2, 3, bytes);
  CHECK(scene.engine.write({&third, 1}, soon()) == 0);
  const auto writes = scene.nodes[2].writes();
  CHECK(writes.size() == 4);
  CHECK(writes[0].channel == writes[2].channel && writes[0].seq == writes[2].seq);
  CHECK(writes[1].channel != writes[0].channel);
  CHECK(writes[3].channel == writes[0].channel && writes[3].seq == writes[0].seq + 1);  // known now: reused
  for (const auto& write : writes) CHECK(write.client == 42);
}

void truncate_extend_and_remove_carry_no_bytes() {
  Scene scene;
  Bytes bytes = random_bytes(9000, 1);
  Piece pieces[] = {piece(1, 0, 3, bytes), piece(1, 1, 3, bytes)};
  CHECK(scene.engine.write(pieces, soon()) == 0);
  Piece cuts[] = {{.chunk = {1, 0}, .chain = 3, .length = 100, .kind = Kind::truncate},
                  {.chunk = {1, 1}, .chain = 3, .kind = Kind::remove},
                  {.chunk = {1, 2}, .chain = 3, .length = 50, .kind = Kind::extend}};
  CHECK(scene.engine.write(cuts, soon()) == 0);
  bytes.resize(100);
  CHECK(scene.nodes[2].get({1, 0}) == bytes && scene.nodes[2].get({1, 1}).empty());
  CHECK(scene.nodes[2].get({1, 2}) == Bytes(50));
  Piece last{.chunk = {1, kLastIndex}, .chain = 3};
  CHECK(scene.engine.query_last({&last, 1}, soon()) == 0 && last.found == 2 && last.run == 1 &&
        last.chunk_length == 50);
  Piece first{.chunk = {1, 0}, .chain = 3};
  CHECK(scene.engine.query_last({&first, 1}, soon()) == 0 && first.found == 0 && first.run == 1 &&
        first.chunk_length == 100);
  Piece none{.chunk = {2, kLastIndex}, .chain = 3};
  CHECK(scene.engine.query_last({&none, 1}, soon()) == 0 && none.run == 0);
}

void a_deadline_ends_the_call_and_late_answers_touch_nothing() {
  Scene scene;
  const Bytes good = random_bytes(5000, 3);
  for (auto& node : scene.nodes) node.put({1, 0}, good);
  std::mutex gate;
  gate.lock();
  scene.nodes[2].script([&gate](int fd, const ReceivedFrame&, Bytes answer) {
    std::lock_guard passed(gate);
    return ScriptedNode::whole(fd, answer);
  });
  Bytes a(5000), b(5000);
  Piece pieces[] = {piece(1, 0, 3, a), piece(1, 0, 1, b)};
  CHECK(scene.engine.read(pieces, Clock::now() + 50ms) == 1);
  CHECK(pieces[0].outcome == Outcome::late && pieces[1].outcome == Outcome::ok && b == good);
  gate.unlock();
  pieces[0].outcome = Outcome::open;
  CHECK(scene.engine.read(pieces, soon()) == 0 && a == good);
  CHECK(scene.nodes[2].connections == 2);  // not the connection on which the late answer comes
}

void a_node_that_leaves_the_chain_is_not_waited_for() {
  Scene scene;
  std::mutex gate;
  gate.lock();
  scene.nodes[2].script([&gate](int fd, const ReceivedFrame&, Bytes answer) {
    std::lock_guard passed(gate);
    return ScriptedNode::whole(fd, answer);
  });
  Bytes a(100'000), b(5000);
  scene.nodes[0].put({1, 0}, Bytes(5000));
  Piece pieces[] = {piece(1, 0, 3, a), piece(1, 0, 1, b)};
  pieces[1].choice = 0;
  std::thread caller([&] { CHECK(scene.engine.read(pieces, soon()) == 1); });
  while (scene.nodes[2].frames == 0) std::this_thread::yield();
  const Route routes[] = {{1, 11, {0}}, {3, 31, {1}}};
  scene.engine.routing(routes, kAnyNode);
  caller.join();  // long before the deadline
  CHECK(pieces[0].outcome == Outcome::lost && pieces[1].outcome == Outcome::ok);
  CHECK(scene.engine.statistics().senders == 0);
  gate.unlock();
}

void a_server_that_comes_back_gets_a_new_connection() {
  Scene scene;
  Bytes bytes = random_bytes(5000, 3), back(5000);
  Piece write = piece(1, 0, 3, bytes), read = piece(1, 0, 3, back);
  CHECK(scene.engine.write({&write, 1}, soon()) == 0);
  scene.nodes[2].stop();
  // The engine sees that the old connection has ended.
  CHECK(scene.engine.read({&read, 1}, soon()) == 0 && back == bytes);
}

void few_send_much_at_a_time() {
  Scene scene({.lanes = 8, .senders = 2, .local = false});
  const Bytes good = random_bytes(400'000, 3);
  for (auto& node : scene.nodes) node.put({1, 0}, good);
  std::atomic<int> wrong = 0;
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 6; ++caller) {
    callers.emplace_back([&, caller] {
      for (int round = 0; round < (FF_THREAD_SANITIZER ? 2 : 5); ++round) {
        std::vector<Bytes> back(12, Bytes(400'000));
        std::vector<Piece> reads;
        for (std::uint32_t n = 0; n < 12; ++n)
          reads.push_back(piece(1, 0, 1 + (n + static_cast<unsigned>(caller)) % 3, back[n]));
        if (scene.engine.read(reads, soon()) != 0) ++wrong;
        for (const Bytes& bytes : back) wrong += bytes != good;
      }
    });
  }
  for (auto& caller : callers) caller.join();
  const auto statistics = scene.engine.statistics();
  CHECK(wrong == 0 && statistics.senders == 0);
  CHECK(statistics.most_senders == 2 && statistics.held > 0);
}

void a_node_that_dies_gives_its_permits_back() {
  Scene scene({.lanes = 4, .senders = 1, .local = false});
  const Bytes good = random_bytes(300'000, 3);
  for (auto& node : scene.nodes) node.put({1, 0}, good);
  scene.nodes[0].script([](int fd, const ReceivedFrame&, Bytes answer) {
    answer.resize(answer.size() / 2);
    return ScriptedNode::whole(fd, answer) && false;
  });
  std::vector<std::thread> callers;
  std::atomic<int> wrong = 0;
  for (std::uint32_t caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&, caller] {
      for (int round = 0; round < 10; ++round) {
        Bytes a(300'000), b(300'000);
        Piece pieces[] = {piece(1, 0, 1, a), piece(1, 0, 3, b)};
        pieces[0].choice = caller % 2;
        scene.engine.read(pieces, soon());
        wrong += pieces[0].outcome != (caller % 2 == 0 ? Outcome::lost : Outcome::ok);
        wrong += pieces[1].outcome != Outcome::ok;
      }
    });
  }
  for (auto& caller : callers) caller.join();
  CHECK(wrong == 0 && scene.engine.statistics().senders == 0);
}

void many_callers_share_few_lanes() {
  Scene scene({.lanes = 2});
  std::vector<std::thread> callers;
  std::atomic<int> wrong = 0;
  for (std::uint32_t caller = 0; caller < 8; ++caller) {
    callers.emplace_back([&, caller] {
      for (std::uint32_t round = 0; round < 20; ++round) {
        Bytes bytes = random_bytes(3000 + caller * 1000 + round, round), back(bytes.size());
        Piece write = piece(100 + caller, round, 3, bytes), read = piece(100 + caller, round, 3, back);
        wrong +=
            scene.engine.write({&write, 1}, soon()) != 0 || scene.engine.read({&read, 1}, soon()) != 0 || back != bytes;
      }
    });
  }
  for (auto& caller : callers) caller.join();
  CHECK(wrong == 0 && scene.nodes[2].connections <= 2);
}

void a_large_chunk_is_one_frame() {
  Scene scene;
  Bytes bytes = random_bytes(std::size_t{9} << 20, 3), back(bytes.size());
  Piece write = piece(1, 0, 3, bytes, 123), read = piece(1, 0, 3, back, 123);
  CHECK(scene.engine.write({&write, 1}, soon()) == 0);
  CHECK(scene.engine.read({&read, 1}, soon()) == 0 && back == bytes);
}

}  // namespace
}  // namespace ff::fs3::io

int main() {
  using namespace ff::fs3::io;
  bytes_come_back_as_they_were_written();
  writes_go_to_the_head_and_reads_to_any();
  what_cannot_be_routed_or_reached_is_told_for_each();
  wrong_bytes_are_found_reported_and_read_elsewhere();
  a_broken_answer_loses_its_pieces_and_no_more();
  short_reads_and_writes_are_put_together();
  a_write_whose_outcome_is_not_known_keeps_its_tag();
  truncate_extend_and_remove_carry_no_bytes();
  a_deadline_ends_the_call_and_late_answers_touch_nothing();
  a_node_that_leaves_the_chain_is_not_waited_for();
  a_server_that_comes_back_gets_a_new_connection();
  few_send_much_at_a_time();
  a_node_that_dies_gives_its_permits_back();
  many_callers_share_few_lanes();
  a_large_chunk_is_one_frame();
}
