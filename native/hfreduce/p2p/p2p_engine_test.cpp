// Point-to-point messages between ranks that are threads of this process: contents, order,
// matching, bounds.
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "base/testing/check.hpp"
#include "hfreduce/p2p/test_ranks.hpp"

using namespace ff;
using namespace ff::hfreduce;
using namespace ff::hfreduce::test;

namespace {

// Sizes of messages in bytes. They are smaller with the thread sanitizer, which clears four bytes of shadow memory for
// each byte.
constexpr std::size_t kLarge = FF_THREAD_SANITIZER ? 5UL << 20 : 20UL << 20;
constexpr std::size_t kLong = FF_THREAD_SANITIZER ? 200'000 : 1'500'000;

void messages_of_all_sizes_in_both_directions(bool tcp) {
  auto posts = make_world(2, tcp);
  for (const std::size_t bytes : {0UL, 1UL, 8UL, 65'536UL, 65'537UL, 3UL << 20, kLarge}) {
    for (const bool attended : {false, true}) {
      std::vector<std::thread> ranks;
      for (const std::size_t r : {0UL, 1UL}) {
        ranks.emplace_back([&, r] {
          const int peer = static_cast<int>(1 - r);
          const Bytes mine = pattern(bytes, r);
          Bytes theirs(bytes);
          const auto sent = posts[r]->send(peer, 5, mine.data(), bytes, 60, attended);
          const auto received = posts[r]->receive(peer, 5, theirs.data(), bytes, 60, attended);
          expect_ok(*posts[r], sent);
          expect_ok(*posts[r], received);
          CHECK(theirs == pattern(bytes, 1 - r) && received->source == peer);
        });
      }
      for (auto& rank : ranks) rank.join();
    }
  }
}

void tags_are_matched_in_any_order() {
  auto posts = make_world(2);
  std::vector<Bytes> sent, received(40);
  std::vector<OperationPtr> sends, receives;
  for (std::size_t i = 0; i < 40; ++i) {
    sent.push_back(pattern(i % 3 == 0 ? 100'000 + i : i, i));
    sends.push_back(posts[0]->send(1, i / 2, sent[i].data(), sent[i].size(), 60));
  }
  for (std::size_t tag = 20; tag-- > 0;) {
    for (const std::size_t i : {2 * tag, 2 * tag + 1}) {
      received[i].resize(sent[i].size());
      receives.push_back(posts[1]->receive(0, tag, received[i].data(), received[i].size(), 60));
    }
  }
  for (const auto& send : sends) expect_ok(*posts[0], send);
  for (const auto& receive : receives) expect_ok(*posts[1], receive);
  CHECK(sent == received);
}

void any_source_takes_the_earliest_and_names_its_sender() {
  auto posts = make_world(4);
  int values[4] = {0, 10, 20, 30}, got[6] = {};
  std::vector<OperationPtr> receives;
  for (int i = 0; i < 3; ++i) receives.push_back(posts[0]->receive(-1, 1, &got[i], sizeof(int), 60));
  for (const std::size_t r : {2UL, 1UL, 3UL}) {
    expect_ok(*posts[r], posts[r]->send(0, 1, &values[r], sizeof(int), 60));
    const auto& served = receives[r == 2 ? 0 : r == 1 ? 1 : 2];
    expect_ok(*posts[0], served);
    CHECK(served->source == static_cast<int>(r));
  }
  CHECK(got[0] == 20 && got[1] == 10 && got[2] == 30);
  // The earliest posted receive gets a message, whether the receive is from one rank or from any.
  const auto exact = posts[0]->receive(1, 2, &got[3], sizeof(int), 60);
  const auto any = posts[0]->receive(-1, 2, &got[4], sizeof(int), 60);
  const auto last = posts[0]->receive(1, 2, &got[5], sizeof(int), 60);
  int first = 1, second = 2, third = 3;
  for (int* value : {&first, &second, &third}) {
    expect_ok(*posts[1], posts[1]->send(0, 2, value, sizeof(int), 60));
  }
  for (const auto& receive : {exact, any, last}) expect_ok(*posts[0], receive);
  CHECK(got[3] == 1 && got[4] == 2 && got[5] == 3 && any->source == 1);
  // A receive from any source also takes a message that was announced before the receive.
  Bytes large = pattern(200'000, 7), target(200'000);
  const auto announced = posts[3]->send(0, 4, large.data(), large.size(), 60);
  const auto taken = posts[0]->receive(-1, 4, target.data(), target.size(), 60);
  expect_ok(*posts[0], taken);
  expect_ok(*posts[3], announced);
  CHECK(taken->source == 3 && target == large);
}

// Every rank sends to every other rank and receives in its own order; 2,000 messages in all.
void random_traffic(std::uint64_t seed, bool tcp) {
  constexpr std::size_t kWorld = 5, kPairMessages = 100;
  struct Plan {
    std::uint64_t tag;
    std::size_t bytes;
  };
  std::mt19937_64 random(seed);
  std::vector<Plan> plans[kWorld][kWorld];
  for (auto& row : plans) {
    for (auto& plan : row) {
      for (std::size_t i = 0; i < kPairMessages; ++i) {
        const std::size_t scale[] = {1, 100, 5'000, 66'000, 66'000, 66'000, 100'000, kLong};
        plan.push_back({random() % 4, random() % scale[random() % 8]});
      }
    }
  }
  auto posts = make_world(kWorld, tcp);
  std::vector<std::thread> ranks;
  for (std::size_t r = 0; r < kWorld; ++r) {
    ranks.emplace_back([&, r] {
      std::mt19937_64 order(seed * 31 + r);
      struct Flight {
        OperationPtr operation;
        Bytes bytes;
        std::uint64_t expected;  // seed of the pattern
        bool sending;
      };
      std::vector<Flight> flights;
      std::vector<std::size_t> sends(kWorld), receives(kWorld);  // next message, by peer
      for (std::size_t left = 2 * (kWorld - 1) * kPairMessages; left > 0;) {
        const std::size_t peer = order() % kWorld;
        const bool sending = order() % 2 == 0;
        std::size_t& next = (sending ? sends : receives)[peer];
        if (peer == r || next == kPairMessages) continue;
        const Plan plan = (sending ? plans[r][peer] : plans[peer][r])[next];
        const std::uint64_t mark = (sending ? r * 7 + peer : peer * 7 + r) + next * 100;
        flights.push_back({nullptr, sending ? pattern(plan.bytes, mark) : Bytes(plan.bytes), mark, sending});
        char* data = flights.back().bytes.data();
        const int to = static_cast<int>(peer);
        flights.back().operation = sending ? posts[r]->send(to, plan.tag, data, plan.bytes, 60)
                                           : posts[r]->receive(to, plan.tag, data, plan.bytes, 60);
        ++next, --left;
        if (order() % 16 == 0) posts[r]->wait(*flights[order() % flights.size()].operation, 1e-4);
      }
      for (auto& flight : flights) {
        expect_ok(*posts[r], flight.operation);
        CHECK(flight.bytes == pattern(flight.bytes.size(), flight.expected));
      }
    });
  }
  for (auto& rank : ranks) rank.join();
}

void threads_of_one_rank_wait_side_by_side() {
  auto posts = make_world(2);
  std::vector<std::thread> threads;
  for (std::uint64_t tag = 0; tag < 4; ++tag) {
    for (const std::size_t r : {0UL, 1UL}) {
      threads.emplace_back([&, tag, r] {
        const int peer = static_cast<int>(1 - r);
        for (std::uint64_t i = 0; i < 300; ++i) {
          std::uint64_t value = r == 0 ? i : 0;
          const auto send = [&] {
            expect_ok(*posts[r], posts[r]->send(peer, tag, &value, sizeof value, 60, tag % 2 == 0));
          };
          if (r == 0) send();
          expect_ok(*posts[r], posts[r]->receive(peer, tag, &value, sizeof value, 60, tag < 2));
          CHECK(value == i);
          if (r == 1) send();
        }
      });
    }
  }
  for (auto& thread : threads) thread.join();
}

void messages_without_a_receive_are_bounded() {
  auto posts = make_world(2);
  const Bytes large = pattern(60'000, 1);
  std::vector<OperationPtr> sends;
  for (int i = 0; i < 400; ++i) sends.push_back(posts[0]->send(1, 1, large.data(), large.size(), 60));
  for (int i = 0; i < 400; ++i) sends.push_back(posts[0]->send(1, 2, nullptr, 0, 60));
  const std::size_t eager = mail::kWindow / (large.size() + mail::kRecordBytes);
  for (std::size_t i = 0; i < eager; ++i) expect_ok(*posts[0], sends[i]);
  CHECK(!posts[0]->wait(*sends[eager], 0.01) && !posts[0]->wait(*sends[399], 0));
  Bytes got(large.size());
  for (int i = 0; i < 400; ++i) expect_ok(*posts[1], posts[1]->receive(0, 2, nullptr, 0, 60));
  for (int i = 0; i < 400; ++i) {
    expect_ok(*posts[1], posts[1]->receive(0, 1, got.data(), got.size(), 60));
    CHECK(got == large);
  }
  for (const auto& send : sends) expect_ok(*posts[0], send);
  // The credit has returned: further eager messages are sent before any receive is posted.
  for (std::size_t i = 0; i < eager / 2; ++i) {
    expect_ok(*posts[0], posts[0]->send(1, 1, large.data(), large.size(), 60));
  }
}

void different_sizes_fail_and_the_stream_goes_on() {
  auto posts = make_world(2);
  Bytes small(10), other(20), large(100'000), larger(200'000);
  int value = 1, got = 0;
  for (const bool first : {true, false}) {
    for (const auto& [sent, received] :
         {std::pair(&small, &other), {&large, &larger}, {&larger, &small}, {&small, &larger}}) {
      OperationPtr receive, send;
      const auto post_receive = [&] { receive = posts[1]->receive(0, 1, received->data(), received->size(), 60); };
      if (first) post_receive();
      send = posts[0]->send(1, 1, sent->data(), sent->size(), 60);
      const auto next = posts[0]->send(1, 2, &value, sizeof value, 60);
      if (!first) {
        expect_ok(*posts[1], posts[1]->receive(0, 2, &got, sizeof got, 60));  // now the first message waits there, too
        post_receive();
      }
      const auto text = expect_error(*posts[1], receive, Code::collective);
      CHECK(contains(text, std::to_string(sent->size())));
      CHECK(contains(text, std::to_string(received->size())));
      if (sent->size() > mail::kEagerBytes) {
        CHECK(expect_error(*posts[0], send, Code::collective) == text);
      } else {
        expect_ok(*posts[0], send);
      }
      if (first) expect_ok(*posts[1], posts[1]->receive(0, 2, &got, sizeof got, 60));
      expect_ok(*posts[0], next);
    }
  }
}

void links_may_come_late() {
  auto posts = make_world(2, false, false);
  Bytes sent = pattern(300'000, 6), target(300'000);
  std::vector<OperationPtr> sends, receives;
  for (const std::size_t bytes : {8UL, 300'000UL, 0UL}) {
    receives.push_back(posts[1]->receive(0, bytes, target.data(), bytes, 60));
    sends.push_back(posts[0]->send(1, bytes, sent.data(), bytes, 60));
    CHECK(!sends.back()->done());
  }
  expect_error(*posts[0], posts[0]->send(1, 1, sent.data(), 8, 0.01), Code::deadline_exceeded);
  link(posts, 0, 1, false);
  for (const auto& send : sends) expect_ok(*posts[0], send);
  for (const auto& receive : receives) expect_ok(*posts[1], receive);
  CHECK(target == sent);
  int refused = 0, ends[2];
  for (const int rank : {1, 0, 2, -1}) {
    socket_pair(false, ends);
    try {
      posts[0]->add_outgoing(rank, ends[0]);
    } catch (const Error& error) {
      refused += error.code() == Code::invalid;
    }
    char nothing;
    CHECK(::recv(ends[1], &nothing, 1, 0) == 0);  // closed
    ::close(ends[1]);
  }
  CHECK(refused == 4);
  for (const int rank : {0, 2, -2}) {
    try {
      posts[0]->receive(rank, 1, target.data(), 1, 60);
      CHECK(false);
    } catch (const Error& error) {
      CHECK(error.code() == Code::invalid);
    }
  }
}

}  // namespace

int main() {
  for (const bool tcp : {false, true}) {
    messages_of_all_sizes_in_both_directions(tcp);
    random_traffic(tcp ? 1 : 2, tcp);
  }
  tags_are_matched_in_any_order();
  any_source_takes_the_earliest_and_names_its_sender();
  threads_of_one_rank_wait_side_by_side();
  messages_without_a_receive_are_bounded();
  different_sizes_fail_and_the_stream_goes_on();
  links_may_come_late();
}
