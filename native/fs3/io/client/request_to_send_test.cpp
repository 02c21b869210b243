// Request to send: the engine against nodes that hold their answers until `go`.
#include <array>
#include <cstring>
#include <thread>

#include "base/error.hpp"
#include "base/testing/check.hpp"
#include "fs3/io/client/engine.hpp"
#include "fs3/io/client/scripted_node.hpp"

namespace ff::fs3::io {
namespace {

using namespace std::chrono_literals;
using Clock = Engine::Clock;

constexpr std::size_t kSize = std::size_t{3} << 20;  // bytes of a piece; each piece is one frame

Clock::time_point soon() { return Clock::now() + 60s; }

struct Scene {  // chain n + 1 is on node n alone
  explicit Scene(unsigned senders, std::size_t size = kSize) : good(random_bytes(size, 3)) {
    std::vector<Route> routes;
    for (std::uint32_t n = 0; n < nodes.size(); ++n) {
      routes.push_back({n + 1, 1, {n}});
      nodes[n].put({1, 0}, good);
    }
    options.senders = senders;
    engine.emplace(42, options,
                   [this](std::uint32_t node, std::chrono::milliseconds) { return nodes[node].connect(); });
    engine->routing(routes, kAnyNode);
  }
  // Returns one piece of each of these nodes.
  std::vector<Piece> pieces(std::initializer_list<std::uint32_t> of) {
    std::vector<Piece> found;
    memory.assign(of.size(), Bytes(good.size()));
    for (const std::uint32_t node : of) {
      found.push_back({.chunk = {1, 0},
                       .chain = node + 1,
                       .length = static_cast<std::uint32_t>(good.size()),
                       .memory = memory[found.size()].data()});
    }
    return found;
  }
  void all_free() const { CHECK(engine->statistics().senders == 0); }

  const Bytes good;
  std::array<ScriptedNode, 4> nodes;
  EngineOptions options{.lanes = 8, .senders = 1, .local = false};
  std::vector<Bytes> memory;
  std::optional<Engine> engine;  // destroyed before its nodes
};

bool is_go(const ReceivedFrame& received) { return received.head.kind == FrameKind::go; }

void few_nodes_are_not_asked_to_hold() {
  Scene scene(2);
  for (auto& node : scene.nodes) node.gate([](int, const ReceivedFrame&) { return false; });
  auto pieces = scene.pieces({0, 1, 0, 1, 0});
  CHECK(scene.engine->read(pieces, soon()) == 0);
  for (const Bytes& bytes : scene.memory) CHECK(bytes == scene.good);
  CHECK(scene.engine->statistics().held == 0 && scene.engine->statistics().most_senders == 2);
  scene.all_free();
}

void small_reads_go_without() {
  Scene scene(1, kHoldFrom);
  for (auto& node : scene.nodes) node.gate([](int, const ReceivedFrame&) { return false; });
  auto pieces = scene.pieces({0, 1, 2, 3});
  CHECK(scene.engine->read(pieces, soon()) == 0 && scene.engine->statistics().most_senders == 0);
}

// The nodes count the transfers: a transfer begins with `go` and ends with its last byte.
void at_most_senders_transfers_at_a_time() {
  for (const int senders : {1, 2, 3}) {
    Scene scene(static_cast<unsigned>(senders), 300'000);
    std::atomic<int> sending = 0, wrong = 0;
    for (auto& node : scene.nodes) {
      node.gate([&](int, const ReceivedFrame& received) -> std::optional<bool> {
        if (is_go(received)) wrong += ++sending > senders;
        return {};
      });
      node.script([&](int fd, const ReceivedFrame& received, Bytes answer) {
        const Bytes last(answer.end() - 1, answer.end());
        answer.pop_back();
        if (!ScriptedNode::whole(fd, answer)) return false;
        if ((received.head.flags & kHold) != 0) --sending;
        return ScriptedNode::whole(fd, last);
      });
    }
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 5; ++caller) {
      callers.emplace_back([&] {
        for (int round = 0; round < (FF_THREAD_SANITIZER ? 2 : 4); ++round) {
          std::vector<Bytes> memory(8, Bytes(300'000));
          std::vector<Piece> pieces;
          for (std::uint32_t n = 0; n < 8; ++n) {
            pieces.push_back({.chunk = {1, 0}, .chain = n % 4 + 1, .length = 300'000, .memory = memory[n].data()});
          }
          wrong += scene.engine->read(pieces, soon()) != 0;
          for (const Bytes& bytes : memory) wrong += bytes != scene.good;
        }
      });
    }
    for (auto& caller : callers) caller.join();
    const auto statistics = scene.engine->statistics();
    CHECK(wrong == 0 && sending == 0 && statistics.most_senders == static_cast<unsigned>(senders));
    CHECK(statistics.held > 0);
    scene.all_free();
  }
}

void what_is_ready_first_goes_first() {
  Scene scene(1);
  std::vector<std::uint64_t> asked, told;
  scene.nodes[2].gate([&](int fd, const ReceivedFrame& received) -> std::optional<bool> {
    if (is_go(received)) {
      told.push_back(received.head.request);
      return {};
    }
    asked.push_back(received.head.request);
    if (asked.size() < 3) return true;
    Bytes all;
    for (const std::size_t n : {2, 0, 1}) {
      const Bytes one = ScriptedNode::ready(asked[n]);
      all.insert(all.end(), one.begin(), one.end());
    }
    return ScriptedNode::whole(fd, all);
  });
  auto pieces = scene.pieces({2, 2, 2, 0});
  CHECK(scene.engine->read(pieces, soon()) == 0);
  CHECK((told == std::vector{asked[2], asked[0], asked[1]}) && scene.engine->statistics().most_senders == 1);
  for (const Bytes& bytes : scene.memory) CHECK(bytes == scene.good);
  scene.all_free();
}

// A node whose disk is slow takes no permit.
void a_node_that_is_not_ready_blocks_no_other_node() {
  Scene scene(1);
  std::atomic<int> others = 0;
  scene.nodes[0].gate([&](int, const ReceivedFrame&) -> std::optional<bool> {
    while (others != 9) std::this_thread::yield();
    return {};
  });
  for (std::uint32_t n = 1; n < 4; ++n) {
    scene.nodes[n].gate([&](int, const ReceivedFrame& received) -> std::optional<bool> {
      others += is_go(received);
      return {};
    });
  }
  auto pieces = scene.pieces({0, 1, 1, 1, 2, 2, 2, 3, 3, 3});
  CHECK(scene.engine->read(pieces, soon()) == 0 && others == 9);
  scene.all_free();
}

void a_connection_lost_before_ready_costs_its_pieces_only() {
  Scene scene(1);
  scene.nodes[1].gate([](int, const ReceivedFrame&) { return false; });
  auto pieces = scene.pieces({0, 1, 2});
  CHECK(scene.engine->read(pieces, soon()) == 1 && pieces[1].outcome == Outcome::lost);
  scene.all_free();
}

void a_connection_lost_while_it_waits_gives_its_place_up() {
  Scene scene(1);
  std::atomic<bool> sending = false, died = false;
  scene.nodes[0].gate([&](int, const ReceivedFrame& received) -> std::optional<bool> {
    if (!is_go(received)) return {};
    sending = true;
    while (!died) std::this_thread::yield();
    return {};
  });
  scene.nodes[1].gate([&](int fd, const ReceivedFrame& received) -> std::optional<bool> {
    while (!sending) std::this_thread::yield();
    CHECK(ScriptedNode::whole(fd, ScriptedNode::ready(received.head.request)));
    died = true;
    return false;
  });
  scene.nodes[2].gate([&](int, const ReceivedFrame& received) -> std::optional<bool> {
    if (!is_go(received)) {
      while (!died) std::this_thread::yield();  // asks for its permit after the node that died
    }
    return {};
  });
  auto pieces = scene.pieces({0, 1, 2});
  CHECK(scene.engine->read(pieces, soon()) == 1 && pieces[1].outcome == Outcome::lost);
  CHECK(scene.engine->statistics().most_senders == 1);
  scene.all_free();
}

void a_connection_lost_after_go_gives_its_place_up() {
  Scene scene(1);
  scene.nodes[1].script([](int fd, const ReceivedFrame&, Bytes answer) {
    answer.resize(answer.size() / 2);
    return ScriptedNode::whole(fd, answer) && false;
  });
  auto pieces = scene.pieces({0, 1, 1, 2});
  CHECK(scene.engine->read(pieces, soon()) == 2);
  CHECK(pieces[1].outcome == Outcome::lost && pieces[2].outcome == Outcome::lost);
  scene.all_free();
}

void a_deadline_gives_everything_back() {
  Scene scene(1);
  std::mutex gate;
  gate.lock();
  scene.nodes[0].gate([&](int, const ReceivedFrame& received) -> std::optional<bool> {
    if (!is_go(received)) return {};
    std::lock_guard passed(gate);  // got `go`, but sends nothing
    return {};
  });
  scene.nodes[3].gate([&](int, const ReceivedFrame&) -> std::optional<bool> {
    std::lock_guard passed(gate);  // never ready
    return {};
  });
  auto pieces = scene.pieces({0, 3});
  CHECK(scene.engine->read(pieces, Clock::now() + 50ms) == 2);
  CHECK(pieces[0].outcome == Outcome::late && pieces[1].outcome == Outcome::late);
  scene.all_free();
  auto waiting = scene.pieces({0, 1, 2});  // one node got `go`, the other nodes wait for the permit
  CHECK(scene.engine->read(waiting, Clock::now() + 50ms) >= 1);
  scene.all_free();
  gate.unlock();
  auto again = scene.pieces({0, 1, 2, 3});
  CHECK(scene.engine->read(again, soon()) == 0);
  for (const Bytes& bytes : scene.memory) CHECK(bytes == scene.good);
  scene.all_free();
}

void an_answer_that_was_not_held_is_as_good() {
  Scene scene(1);
  for (auto& node : scene.nodes) node.holds = false;
  auto pieces = scene.pieces({0, 1, 2, 3});
  CHECK(scene.engine->read(pieces, soon()) == 0 && scene.engine->statistics().held == 4);
  CHECK(scene.engine->statistics().most_senders == 0);
  for (const Bytes& bytes : scene.memory) CHECK(bytes == scene.good);
}

void a_node_that_breaks_the_rules_loses_its_connection() {
  const ScriptedNode::Gate gates[] = {
      [](int fd, const ReceivedFrame& received) -> std::optional<bool> {  // ready twice
        const Bytes one = ScriptedNode::ready(received.head.request);
        return is_go(received) || (ScriptedNode::whole(fd, one) && ScriptedNode::whole(fd, one));
      },
      [](int fd, const ReceivedFrame& received) -> std::optional<bool> {  // ready for a request that was never made
        return ScriptedNode::whole(fd, ScriptedNode::ready(received.head.request + 1000));
      },
      [](int fd, const ReceivedFrame& received) -> std::optional<bool> {  // answers a request after its `ready`
        if (is_go(received)) return true;
        Head head;
        head.kind = FrameKind::read_answer;
        head.count = 1;
        head.request = received.head.request;
        head.table_bytes = sizeof(ReadAnswer);
        ReadAnswer answer;
        answer.status = Status::not_found;
        Bytes bytes = ScriptedNode::ready(received.head.request);
        const std::size_t at = bytes.size();
        bytes.resize(at + sizeof head + sizeof answer);
        std::memcpy(bytes.data() + at, &head, sizeof head);
        std::memcpy(bytes.data() + at + sizeof head, &answer, sizeof answer);
        return ScriptedNode::whole(fd, bytes);
      },
  };
  for (const auto& gate : gates) {
    Scene scene(1);
    scene.nodes[1].gate(gate);
    auto pieces = scene.pieces({0, 1, 2});
    CHECK(scene.engine->read(pieces, soon()) == 1 && pieces[1].outcome == Outcome::lost);
    scene.all_free();
    scene.nodes[1].gate({});
    auto again = scene.pieces({0, 1, 2});
    CHECK(scene.engine->read(again, soon()) == 0);
  }
  Scene scene(4);  // ready for a request that was not to be held
  scene.nodes[1].script([](int fd, const ReceivedFrame& received, Bytes) {
    return ScriptedNode::whole(fd, ScriptedNode::ready(received.head.request));
  });
  auto pieces = scene.pieces({0, 1});
  CHECK(scene.engine->read(pieces, soon()) == 1 && pieces[1].outcome == Outcome::lost);
  scene.all_free();
}

}  // namespace
}  // namespace ff::fs3::io

int main() {
  using namespace ff::fs3::io;
  few_nodes_are_not_asked_to_hold();
  small_reads_go_without();
  at_most_senders_transfers_at_a_time();
  what_is_ready_first_goes_first();
  a_node_that_is_not_ready_blocks_no_other_node();
  a_connection_lost_before_ready_costs_its_pieces_only();
  a_connection_lost_while_it_waits_gives_its_place_up();
  a_connection_lost_after_go_gives_its_place_up();
  a_deadline_gives_everything_back();
  an_answer_that_was_not_held_is_as_good();
  a_node_that_breaks_the_rules_loses_its_connection();
}
