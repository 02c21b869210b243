// Messages that are copied out of the sender's arena: contents, order, and the outcome if the sender withdraws a message
// while the receiver copies it.
#include <algorithm>
#include <cstring>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "base/testing/check.hpp"
#include "hfreduce/engine/arena.hpp"
#include "hfreduce/p2p/scripted_peer.hpp"

using namespace ff;
using namespace ff::hfreduce;
using namespace ff::hfreduce::test;

namespace {

using mail::Header;
using FrameKind = mail::Kind;
using mail::Offer;

// Bytes in the arena.
struct Block {
  explicit Block(const Bytes& bytes) : data(Arena::of_process().allocate(bytes.size())), size(bytes.size()) {
    std::copy(bytes.begin(), bytes.end(), data);
  }
  ~Block() { Arena::of_process().release(data); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  bool operator==(const Bytes& other) const {
    return size == other.size() && std::equal(data, data + size, other.begin());
  }

  char* data;
  std::size_t size;
};

// An offer found on the link, and memory mapped as a receiver would map it.
struct Found {
  Header header;
  Offer offer;
  mail::Offered offered;

  explicit Found(int fd) {
    struct {
      Header header;
      Offer offer;
    } frame;
    iovec part{&frame, sizeof frame};
    alignas(cmsghdr) char control[CMSG_SPACE(2 * sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    CHECK(::recvmsg(fd, &message, MSG_WAITALL) == static_cast<ssize_t>(sizeof frame));
    header = frame.header;
    offer = frame.offer;
    CHECK(header.kind == FrameKind::offer);
    std::vector<int> descriptors(mail::Offered::descriptors(offer));
    CHECK(descriptors.size() == 2);
    const cmsghdr* rights = CMSG_FIRSTHDR(&message);
    CHECK(rights != nullptr && rights->cmsg_len == CMSG_LEN(2 * sizeof(int)));
    std::memcpy(descriptors.data(), CMSG_DATA(rights), 2 * sizeof(int));
    offered.map(offer, descriptors);
  }
};

void both_ways_at_once_and_in_order() {
  auto posts = make_world(3, false, true, true);
  std::vector<std::thread> ranks;
  for (std::size_t r = 0; r < 3; ++r) {
    ranks.emplace_back([&, r] {
      std::mt19937_64 order(r);
      const std::size_t most = FF_THREAD_SANITIZER ? 200'000 : 1'500'000;  // the sanitizer is slow
      for (int round = 0; round < 4; ++round) {
        std::vector<std::unique_ptr<Block>> sent, received;
        std::vector<std::pair<OperationPtr, Bytes>> receives;
        std::vector<OperationPtr> sends;
        for (std::size_t i = 0; i < 16; ++i) {
          const std::size_t bytes = (i * 137'123 + static_cast<std::size_t>(round) * 300'007) % most;
          for (const std::size_t peer : {(r + 1) % 3, (r + 2) % 3}) {
            sent.push_back(std::make_unique<Block>(pattern(bytes, r * 16 + i)));
            received.push_back(std::make_unique<Block>(Bytes(bytes)));
            const int to = static_cast<int>(peer);
            sends.push_back(posts[r]->send(to, i % 2, sent.back()->data, bytes, 60));
            receives.emplace_back(posts[r]->receive(to, i % 2, received.back()->data, bytes, 60),
                                  pattern(bytes, peer * 16 + i));
          }
          if (order() % 8 == 0) expect_ok(*posts[r], receives[order() % receives.size()].first);
        }
        for (const auto& send : sends) expect_ok(*posts[r], send);
        for (std::size_t i = 0; i < receives.size(); ++i) {
          expect_ok(*posts[r], receives[i].first);
          CHECK(*received[i] == receives[i].second);
        }
      }
    });
  }
  for (auto& rank : ranks) rank.join();
}

void more_offers_than_slots() {
  auto posts = make_world(2, false, true, true);
  const std::size_t bytes = mail::kEagerBytes + 1;
  Block sent(pattern(bytes, 3));
  Bytes target(bytes);
  std::vector<OperationPtr> sends;
  for (std::size_t i = 0; i < 3 * mail::kSlots; ++i) {
    sends.push_back(posts[0]->send(1, 1, sent.data, bytes, 60));
  }
  for (std::size_t i = 0; i < sends.size(); ++i) {
    expect_ok(*posts[1], posts[1]->receive(0, 1, target.data(), bytes, 60));
    CHECK(sent == std::exchange(target, Bytes(bytes)));
    expect_ok(*posts[0], sends[i]);
  }
}

void different_sizes_fail_on_both_sides() {
  auto posts = make_world(2, false, true, true);
  Block sent(Bytes(100'000)), target(Bytes(200'000));
  const auto send = posts[0]->send(1, 1, sent.data, sent.size, 60);
  const auto receive = posts[1]->receive(0, 1, target.data, target.size, 60);
  CHECK(expect_error(*posts[0], send, Code::collective) == expect_error(*posts[1], receive, Code::collective));
  const auto again = posts[0]->send(1, 1, sent.data, sent.size, 60);
  expect_ok(*posts[1], posts[1]->receive(0, 1, target.data, sent.size, 60));
  expect_ok(*posts[0], again);
}

// No thread calls P2PEngine::wait() here: the engine's own thread sleeps in epoll_wait(), and is woken to copy the
// offered bytes.
void a_sleeping_thread_is_woken_to_copy() {
  auto posts = make_world(2, false, true, true);
  Block sent(pattern(100'000, 6));
  for (int round = 0; round < 20; ++round) {
    Bytes target(sent.size);
    const auto send = posts[0]->send(1, 1, sent.data, sent.size, kNoDeadline);
    CHECK(posts[0]->send(1, 2, nullptr, 0, kNoDeadline)->wait(-1));
    CHECK(posts[1]->receive(0, 2, nullptr, 0, kNoDeadline)->wait(-1));
    CHECK(posts[1]->receive(0, 1, target.data(), sent.size, kNoDeadline)->wait(-1));
    CHECK(send->wait(-1) && sent == target);
  }
}

void the_first_of_claim_and_withdrawal_counts() {
  const Bytes content = pattern(100'000, 2);
  Block sent(content);
  for (const bool claim_first : {true, false}) {
    ScriptedPeer scripted(true, true, true);
    const auto send = scripted.post.send(0, 1, sent.data, sent.size, claim_first ? 1.0 : 0.01);
    Found found(scripted.from);
    const char* bytes = found.offered.find(found.offer, found.header.bytes);
    CHECK(bytes != nullptr && std::equal(content.begin(), content.end(), bytes));
    CHECK(found.offered.find(found.offer, Arena::kSegmentBytes + 1) == nullptr);
    if (claim_first) {
      CHECK(found.offered.claim(found.header.id, found.offer));
      expect_ok(scripted.post, send);  // its deadline passes, but the peer has the bytes
      ScriptedPeer::put(scripted.from, {.kind = FrameKind::done, .tag = 1, .id = found.header.id});
    } else {
      expect_error(scripted.post, send, Code::deadline_exceeded);
      CHECK(!found.offered.claim(found.header.id, found.offer));
      CHECK(ScriptedPeer::get(scripted.from).kind == FrameKind::cancel);
    }
    // The link continues; a peer that cannot map the memory gets the bytes through the socket.
    const auto next = scripted.post.send(0, 1, sent.data, sent.size, kNoDeadline);
    const Header offer = ScriptedPeer::get(scripted.from);
    CHECK(offer.kind == FrameKind::offer);
    ScriptedPeer::get(scripted.from, sizeof(Offer));
    ScriptedPeer::put(scripted.from, {.kind = FrameKind::clear, .tag = 1, .id = offer.id});
    const Header data = ScriptedPeer::get(scripted.from);
    CHECK(data.kind == FrameKind::data && data.bytes == sent.size);
    CHECK(ScriptedPeer::get(scripted.from, data.bytes) == content);
    expect_ok(scripted.post, next);
    // The end of the group withdraws all offers.
    const auto last = scripted.post.send(0, 1, sent.data, sent.size, kNoDeadline);
    const Header final_header = ScriptedPeer::get(scripted.from);
    Offer final_offer;
    std::memcpy(&final_offer, ScriptedPeer::get(scripted.from, sizeof(Offer)).data(), sizeof(Offer));
    scripted.post.fail(Error(Code::collective, "over"));
    expect_error(scripted.post, last, Code::collective);
    CHECK(!found.offered.claim(final_header.id, final_offer));
  }
}

void slots_are_used_again() {
  ScriptedPeer scripted(true, true, true);
  Block sent(pattern(100'000, 2));
  for (std::size_t i = 0; i < 2 * mail::kSlots; ++i) {
    const auto send = scripted.post.send(0, 1, sent.data, sent.size, kNoDeadline);
    const Header offer = ScriptedPeer::get(scripted.from);
    CHECK(offer.kind == FrameKind::offer);
    ScriptedPeer::get(scripted.from, sizeof(Offer));
    ScriptedPeer::put(scripted.from, {.kind = i % 2 ? FrameKind::done : FrameKind::refuse, .tag = 1, .id = offer.id});
    CHECK(scripted.post.wait(*send, -1));
  }
}

void a_withdrawn_offer_fails_its_receive() {
  ScriptedPeer scripted;
  Block content(pattern(5u << 20, 1));
  mail::Offers offers;
  std::vector<int> descriptors;
  const auto offer = offers.make(1, content.data, content.size, descriptors);
  CHECK(offer && descriptors.size() == 2 && offers.withdraw(1, offer->slot));
  Bytes target(content.size);
  const auto receive = scripted.post.receive(0, 1, target.data(), target.size(), kNoDeadline);
  mail::Stream stream(1);
  stream.attach(::dup(scripted.to));
  const Header header{.kind = FrameKind::offer, .tag = 1, .id = 1, .bytes = content.size};
  CHECK(stream.write(reinterpret_cast<const char*>(&header), sizeof header, reinterpret_cast<const char*>(&*offer),
                     sizeof *offer, descriptors) == sizeof header + sizeof *offer);
  CHECK(contains(expect_error(scripted.post, receive, Code::deadline_exceeded, 0), "the sender's timeout passed"));
}

void an_offer_of_nothing_is_refused() {
  Bytes target(100'000);
  for (const bool descriptors_said : {true, false}) {
    ScriptedPeer scripted;
    const auto receive = scripted.post.receive(0, 1, target.data(), target.size(), kNoDeadline);
    ScriptedPeer::put(scripted.to, {.kind = FrameKind::offer, .tag = 1, .id = 1, .bytes = target.size()});
    Offer offer;
    offer.segment = 7;
    offer.slot = UINT32_MAX;
    offer.offset = UINT64_MAX;
    offer.with_segment = descriptors_said ? 1 : 0;
    ScriptedPeer::put(scripted.to, &offer, sizeof offer);
    if (descriptors_said) {
      const auto text = expect_error(scripted.post, receive, Code::rank_failed, 0);
      CHECK(contains(text, "without its descriptors"));
    } else {
      CHECK(ScriptedPeer::get(scripted.to).kind == FrameKind::clear);
      ScriptedPeer::put(scripted.to, {.kind = FrameKind::cancel, .tag = 1, .id = 1});
      expect_error(scripted.post, receive, Code::deadline_exceeded, 0);
    }
  }
}

}  // namespace

int main() {
  both_ways_at_once_and_in_order();
  more_offers_than_slots();
  different_sizes_fail_on_both_sides();
  a_sleeping_thread_is_woken_to_copy();
  the_first_of_claim_and_withdrawal_counts();
  slots_are_used_again();
  a_withdrawn_offer_fails_its_receive();
  an_offer_of_nothing_is_refused();
}
