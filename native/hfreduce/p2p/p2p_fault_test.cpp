// Failing point-to-point messages: deadlines, deaths, garbage. The tests play many peers by hand on raw sockets.
#include <algorithm>
#include <cstring>
#include <functional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "base/testing/check.hpp"
#include "hfreduce/p2p/scripted_peer.hpp"

using namespace ff;
using namespace ff::hfreduce;
using namespace ff::hfreduce::test;

namespace {

using mail::Header;
using FrameKind = mail::Kind;

void a_late_message_meets_the_next_receive() {
  auto posts = make_world(2);
  int got = 0, next = 0, value = 7;
  const auto late = posts[1]->receive(0, 3, &got, sizeof got, 0.01);
  const auto text = expect_error(*posts[1], late, Code::deadline_exceeded);
  CHECK(contains(text, "tag 3") && contains(text, "rank 0") && contains(text, "0.0 s"));
  CHECK(contains(expect_error(*posts[1], posts[1]->receive(-1, 3, &got, sizeof got, 0.01), Code::deadline_exceeded),
                 "any rank"));
  expect_ok(*posts[0], posts[0]->send(1, 3, &value, sizeof value, 60));
  expect_ok(*posts[1], posts[1]->receive(0, 3, &next, sizeof next, 60));
  CHECK(got == 0 && next == 7);
  // A send that is cancelled before its receive is posted leaves no trace. The small message arrives after the cancel.
  Bytes large = pattern(100'000, 1), second = pattern(100'000, 2), target(100'000);
  expect_error(*posts[0], posts[0]->send(1, 4, large.data(), large.size(), 0.01), Code::deadline_exceeded);
  expect_ok(*posts[0], posts[0]->send(1, 5, &value, sizeof value, 60));
  expect_ok(*posts[1], posts[1]->receive(0, 5, &next, sizeof next, 60));
  const auto sent = posts[0]->send(1, 4, second.data(), second.size(), 60);
  expect_ok(*posts[1], posts[1]->receive(0, 4, target.data(), target.size(), 60));
  expect_ok(*posts[0], sent);
  CHECK(target == second);
}

void a_payload_under_way_outlives_its_receive() {
  ScriptedPeer scripted;
  Bytes target(1000, 'x');
  int next = 0;
  const int value = 9;
  const auto drained = [&](std::uint64_t tag, const std::function<void()>& first, const std::function<void()>& rest) {
    const auto late = scripted.post.receive(0, tag, target.data(), target.size(), 0.05);
    first();
    expect_error(scripted.post, late, Code::deadline_exceeded);
    std::fill(target.begin(), target.end(), 'x');
    rest();
    ScriptedPeer::put(scripted.to, {.kind = FrameKind::eager, .tag = 2, .bytes = sizeof value});
    ScriptedPeer::put(scripted.to, &value, sizeof value);
    expect_ok(scripted.post, scripted.post.receive(0, 2, &next, sizeof next, 60));
    CHECK(std::exchange(next, 0) == 9 && std::count(target.begin(), target.end(), 'x') == 1000);
  };
  const Bytes payload = pattern(1000, 5);
  const auto half = [&](std::size_t from) { ScriptedPeer::put(scripted.to, payload.data() + from, 500); };
  const auto begin_eager = [&](std::uint64_t tag) {
    ScriptedPeer::put(scripted.to, {.kind = FrameKind::eager, .tag = tag, .bytes = 1000});
    half(0);
  };
  begin_eager(1);
  ScriptedPeer::settle(scripted.to);  // the first half waits in memory for its receive
  drained(1, [] {}, [&] { half(500); });
  drained(5, [&] { begin_eager(5); }, [&] { half(500); });
  // An announced message. Its announcement is read before its receive is posted, because the message after it, with
  // tag 4, is received first. Its payload comes in two frames.
  ScriptedPeer::put(scripted.to, {.kind = FrameKind::request, .tag = 3, .id = 1, .bytes = 1000});
  ScriptedPeer::put(scripted.to, {.kind = FrameKind::eager, .tag = 4});
  expect_ok(scripted.post, scripted.post.receive(0, 4, nullptr, 0, 60));
  std::thread peer([&] {
    CHECK(ScriptedPeer::get(scripted.to).kind == FrameKind::clear);
    ScriptedPeer::put(scripted.to, {.kind = FrameKind::data, .id = 1, .bytes = 600});
    half(0);
  });
  drained(
      3, [] {},
      [&] {
        peer.join();
        ScriptedPeer::put(scripted.to, payload.data() + 500, 100);
        ScriptedPeer::put(scripted.to, {.kind = FrameKind::data, .id = 1, .bytes = 400});
        ScriptedPeer::put(scripted.to, payload.data() + 600, 400);
      });
}

void a_send_that_ends_early_leaves_a_whole_stream() {
  ScriptedPeer scripted;
  scripted.narrow();
  const Bytes original = pattern(6u << 20, 3);
  Bytes data = original;
  const auto send = scripted.post.send(0, 8, data.data(), data.size(), 0.1);
  const Header request = ScriptedPeer::get(scripted.from);
  CHECK(request.kind == FrameKind::request && request.tag == 8 && request.bytes == data.size());
  ScriptedPeer::put(scripted.from, {.kind = FrameKind::clear, .tag = 8, .id = request.id, .bytes = data.size()});
  expect_error(scripted.post, send, Code::deadline_exceeded);
  std::fill(data.begin(), data.end(), 'z');  // the bytes belong to the caller again
  std::size_t got = 0;
  Header header = ScriptedPeer::get(scripted.from);
  for (; header.kind == FrameKind::data; header = ScriptedPeer::get(scripted.from)) {
    const Bytes chunk = ScriptedPeer::get(scripted.from, header.bytes);
    CHECK(std::equal(chunk.begin(), chunk.end(), original.begin() + static_cast<long>(got)));
    got += chunk.size();
  }
  CHECK(header.kind == FrameKind::cancel && header.id == request.id && got < data.size());
  // The peer cancels a message before its receive is posted, and another message after.
  Bytes target(100'000);
  ScriptedPeer::put(scripted.to, {.kind = FrameKind::request, .tag = 1, .id = 1, .bytes = target.size()});
  ScriptedPeer::put(scripted.to, {.kind = FrameKind::cancel, .tag = 1, .id = 1});
  ScriptedPeer::put(scripted.to, {.kind = FrameKind::request, .tag = 1, .id = 2, .bytes = target.size()});
  const auto receive = scripted.post.receive(0, 1, target.data(), target.size(), kNoDeadline);
  const Header clear = ScriptedPeer::get(scripted.to);
  if (clear.id == 2) ScriptedPeer::put(scripted.to, {.kind = FrameKind::cancel, .tag = 1, .id = 2});
  CHECK(contains(expect_error(scripted.post, receive, Code::deadline_exceeded, 0), "the sender's timeout passed"));
}

void a_dead_peer_ends_what_concerns_it() {
  Bytes data(3u << 20), target(3u << 20);
  {
    ScriptedPeer scripted;  // dies in the middle of a payload
    const auto eager = scripted.post.receive(0, 1, target.data(), 1000, kNoDeadline);
    const auto later = scripted.post.receive(0, 2, target.data(), 8, kNoDeadline);
    const auto send = scripted.post.send(0, 1, data.data(), data.size(), kNoDeadline);
    ScriptedPeer::put(scripted.to, {.kind = FrameKind::eager, .tag = 1, .bytes = 1000});
    ScriptedPeer::put(scripted.to, data.data(), 999);
    ScriptedPeer::put(scripted.from, {.kind = FrameKind::clear, .id = ScriptedPeer::get(scripted.from).id});
    ScriptedPeer::get(scripted.from, 100);
    scripted.close();
    for (const auto& operation : {eager, later, send}) {
      CHECK(contains(expect_error(scripted.post, operation, Code::rank_failed, 0), "rank 0 died or left"));
    }
    expect_error(scripted.post, scripted.post.send(0, 1, data.data(), 8, kNoDeadline), Code::rank_failed, 0);
    expect_error(scripted.post, scripted.post.receive(-1, 1, data.data(), 8, kNoDeadline), Code::collective);
  }
  {
    ScriptedPeer scripted(true, false);  // no link to the peer was ever opened
    const auto send = scripted.post.send(0, 1, data.data(), 8, kNoDeadline);
    scripted.close();
    expect_error(scripted.post, send, Code::rank_failed, 0);
  }
}

void what_was_sent_before_leaving_arrives(bool tcp) {
  auto posts = make_world(3, tcp);
  const Bytes sent = pattern(50'000, 4);
  for (int i = 0; i < 50; ++i) {
    expect_ok(*posts[1], posts[1]->send(0, 1, sent.data(), sent.size(), 60));
  }
  int value = 5, got = 0;
  const auto any = posts[0]->receive(-1, 2, &got, sizeof got, kNoDeadline);
  posts[1].reset();
  Bytes target(sent.size());
  for (int i = 0; i < 50; ++i) {
    expect_ok(*posts[0], posts[0]->receive(1, 1, target.data(), target.size(), kNoDeadline));
    CHECK(target == sent);
  }
  expect_error(*posts[0], posts[0]->receive(1, 1, target.data(), 8, kNoDeadline), Code::rank_failed, 1);
  // Other ranks may still serve a receive from any source, until the last has left.
  expect_ok(*posts[2], posts[2]->send(0, 2, &value, sizeof value, 60));
  expect_ok(*posts[0], any);
  CHECK(got == 5 && any->source == 2);
  const auto nobody = posts[0]->receive(-1, 2, &got, sizeof got, kNoDeadline);
  posts[2].reset();
  CHECK(contains(expect_error(*posts[0], nobody, Code::collective), "every other rank"));
}

// A thread that sleeps in epoll_wait() must notice a message with an earlier deadline, and the end of its own operation
// that another thread caused.
void a_sleeping_poller_is_woken() {
  for (int round = 0; round < 50; ++round) {
    auto posts = make_world(2);
    char bytes[3] = {};
    const auto forever = posts[0]->receive(1, 1, bytes, 1, kNoDeadline);
    std::thread visitor([&] { expect_error(*posts[0], forever, Code::collective); });
    for (int i = 0; i < round % 5; ++i) {
      const auto served = posts[0]->receive(1, 2, bytes + 1, 1, kNoDeadline);
      expect_ok(*posts[1], posts[1]->send(0, 2, bytes + 2, 1, kNoDeadline));
      CHECK(served->wait(-1));
    }
    CHECK(posts[0]->receive(1, 3, bytes + 1, 1, 0.002)->wait(-1));
    posts[0]->fail(Error(Code::collective, "enough"));
    visitor.join();
  }
}

void failing_and_destruction_end_everything() {
  auto posts = make_world(3);
  Bytes large(1u << 20);
  std::vector<OperationPtr> mine, theirs;
  for (int i = 0; i < 20; ++i) {
    mine.push_back(posts[0]->send(1, 1, large.data(), large.size(), kNoDeadline));
    mine.push_back(posts[0]->receive(i % 2 ? 1 : -1, 2, large.data(), 8, kNoDeadline));
  }
  theirs.push_back(posts[1]->receive(0, 9, large.data(), 8, kNoDeadline));
  std::thread waiting([&] { expect_error(*posts[0], mine[1], Code::rank_failed, 2); });
  std::thread failing([&] { posts[0]->fail(Error(Code::rank_failed, "rank 2 is gone", 2)); });
  for (const auto& operation : mine) {
    CHECK(operation->wait(-1));
    expect_error(*posts[0], operation, Code::rank_failed, 2);
  }
  waiting.join();
  failing.join();
  expect_error(*posts[0], posts[0]->send(1, 1, large.data(), 8, kNoDeadline), Code::rank_failed, 2);
  expect_error(*posts[1], theirs[0], Code::rank_failed, 0);
  const auto pending = posts[1]->receive(2, 1, large.data(), 8, kNoDeadline);
  posts[1].reset();
  CHECK(pending->done());
}

// Sends headers with some valid fields, and random bytes, into the incoming or the outgoing link.
void garbage_ends_the_peer_and_nothing_else(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  ScriptedPeer scripted;
  Bytes target(100), large(200'000), noise(5000);
  std::vector<OperationPtr> operations;
  for (std::uint64_t tag = 0; tag < 3; ++tag) {
    operations.push_back(scripted.post.receive(0, tag, target.data(), target.size(), kNoDeadline));
    operations.push_back(scripted.post.receive(-1, tag, large.data(), large.size(), kNoDeadline));
    operations.push_back(scripted.post.send(0, tag, large.data(), large.size(), kNoDeadline));
  }
  const bool forward = seed % 2 == 0;
  const int fd = forward ? scripted.to : scripted.from;
  for (int i = 0; i < 40; ++i) {
    Header header{.kind = static_cast<FrameKind>(random() % 11), .tag = random() % 3, .id = random() % 8};
    const std::uint64_t sizes[] = {0, 100, 200'000, mail::kEagerBytes + 1, random(), random() % 1000};
    header.bytes = sizes[random() % 6];
    if (random() % 20 == 0) header.magic = 7;
    ScriptedPeer::put(fd, header);
    for (auto& byte : noise) byte = static_cast<char>(random());
    const std::size_t bytes = random() % 2 == 0 ? std::min<std::size_t>(header.bytes, 5000) : 0;
    ScriptedPeer::put(fd, noise.data(), bytes);
  }
  for (auto& byte : noise) byte = static_cast<char>(random());
  ScriptedPeer::put(fd, noise.data(), noise.size());
  scripted.close();
  for (const auto& operation : operations) CHECK(scripted.post.wait(*operation, -1));
  const auto after = scripted.post.receive(0, 77, target.data(), 1, kNoDeadline);
  expect_error(scripted.post, after, Code::rank_failed, 0);
}

void malformed_frames_are_named() {
  struct Case {
    bool forward;
    Header header;
    const char* words;
  };
  const Case cases[] = {
      {true, {.magic = 1, .kind = FrameKind::eager}, "not a frame"},
      {true, {.kind = FrameKind::credit}, "unknown frame"},
      {true, {.kind = FrameKind::eager, .bytes = mail::kEagerBytes + 1}, "too long"},
      {true, {.kind = FrameKind::data, .id = 1, .bytes = 8}, "not asked for"},
      {true, {.kind = FrameKind::request, .id = 0, .bytes = 8}, "out of order"},
      {true, {.kind = FrameKind::cancel, .id = 0}, "without a number"},
      {false, {.kind = FrameKind::credit, .bytes = 1}, "more credit"},
      {false, {.kind = FrameKind::eager}, "unknown answer"},
  };
  for (const Case& one : cases) {
    ScriptedPeer scripted;
    char byte = 0;
    const auto receive = scripted.post.receive(0, 1, &byte, 1, kNoDeadline);
    ScriptedPeer::put(one.forward ? scripted.to : scripted.from, one.header);
    const auto text = expect_error(scripted.post, receive, Code::rank_failed, 0);
    CHECK(contains(text, "malformed") && contains(text, one.words));
    expect_error(scripted.post, scripted.post.send(0, 1, &byte, 1, kNoDeadline), Code::rank_failed, 0);
  }
  ScriptedPeer scripted;  // eager messages beyond the window
  const Bytes payload(mail::kEagerBytes);
  char byte = 0;
  const auto receive = scripted.post.receive(0, 1, &byte, 1, kNoDeadline);
  for (int i = 0; i < 129; ++i) {
    ScriptedPeer::put(scripted.to, {.kind = FrameKind::eager, .tag = 2, .bytes = payload.size()});
    ScriptedPeer::put(scripted.to, payload.data(), payload.size());
  }
  CHECK(contains(expect_error(scripted.post, receive, Code::rank_failed, 0), "credit"));
}

}  // namespace

int main() {
  a_late_message_meets_the_next_receive();
  a_payload_under_way_outlives_its_receive();
  a_send_that_ends_early_leaves_a_whole_stream();
  a_dead_peer_ends_what_concerns_it();
  for (const bool tcp : {false, true}) what_was_sent_before_leaving_arrives(tcp);
  a_sleeping_poller_is_woken();
  failing_and_destruction_end_everything();
  malformed_frames_are_named();
  for (std::uint64_t seed = 0; seed < (FF_THREAD_SANITIZER ? 100 : 300); ++seed)
    garbage_ends_the_peer_and_nothing_else(seed);
}
