// A network in memory for tests: byte streams between members, whose bytes a test delivers piece by piece, and deaths of
// members.
#pragma once

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "base/testing/check.hpp"
#include "hfreduce/transport/transport.hpp"

namespace ff::hfreduce {

class SimulatedNetwork {
 public:
  SimulatedNetwork(std::size_t members, std::mt19937_64& random) : members_(members), random_(random) {
    links_.resize(members * members);
    window_ = random() % 3 == 0 ? 1 + random() % 50 : 1 + random() % 2000;
    for (std::size_t m = 0; m < members; ++m) ends_.push_back(std::make_unique<End>(*this, m));
  }

  int rank_of(std::size_t member) const { return static_cast<int>(10 + 3 * member); }

  // Delivers all or some of the bytes in flight on a link. Returns false if there were none.
  bool deliver(std::size_t index) {
    Link& link = links_[index];
    if (link.bytes.size() == link.readable) return false;
    const std::size_t rest = link.bytes.size() - link.readable;
    link.readable += random_() % 2 == 0 ? rest : 1 + random_() % rest;
    return true;
  }

  // Stops the member. Its bytes in flight arrive, or are lost from some byte on.
  void kill(std::size_t member) {
    for (std::size_t peer = 0; peer < members_; ++peer) {
      Link& out = link(member, peer);
      out.broken = link(peer, member).broken = true;
      const std::size_t lost = random_() % (out.bytes.size() - out.readable + 1);
      out.bytes.erase(out.bytes.end() - static_cast<std::ptrdiff_t>(lost), out.bytes.end());
    }
  }

  // Notifies a member of a failure elsewhere, like the watch; rank < 0: of a disagreement between ranks.
  void tell(std::size_t member, int rank) {
    auto& told = ends_[member]->told_;
    if (!told) told = rank < 0 ? Error(Code::collective, "told") : Error(Code::rank_failed, "told", rank);
  }

  class End final : public Transport {
   public:
    End(SimulatedNetwork& network, std::size_t me)
        : network_(network), me_(me), out_(network.members_), in_(network.members_), taken_(network.members_) {}

    void send(int rank, Transfer& transfer) override {
      const std::size_t peer = member(rank);
      post(out_[peer], transfer);
      if (!transfer.done) network_.link(me_, peer).lengths.push_back(transfer.bytes);
    }
    void receive(int rank, Transfer& transfer) override { post(in_[member(rank)], transfer); }
    bool progress() override {
      if (told_) throw Error(*told_);
      bool moved = false;
      for (std::size_t peer = 0; peer < network_.members_; ++peer) {
        moved |= push(peer);
        moved |= pull(peer);
        moved |= complete(peer);
      }
      return moved;
    }
    void wait(std::chrono::milliseconds) override {}
    void wake() override {}
    void abort() override {}
    std::uint64_t bytes_sent() const override { return sent_; }

    bool idle() const {
      const auto empty = [](const auto& queue) { return queue.empty(); };
      return std::all_of(out_.begin(), out_.end(), empty) && std::all_of(in_.begin(), in_.end(), empty) &&
             std::all_of(taken_.begin(), taken_.end(), empty);
    }

   private:
    friend class SimulatedNetwork;
    using Queue = std::deque<Transfer*>;
    struct Taken {
      Transfer* transfer;
      std::vector<char> bytes;
    };

    std::size_t member(int rank) const {
      const auto m = static_cast<std::size_t>(rank - 10) / 3;
      CHECK(m < network_.members_ && m != me_ && network_.rank_of(m) == rank);
      return m;
    }

    static void post(Queue& queue, Transfer& transfer) {
      transfer.moved = 0;
      transfer.done = transfer.bytes == 0;
      if (!transfer.done) queue.push_back(&transfer);
    }

    std::size_t some(std::size_t most) { return network_.random_() % 3 == 0 ? network_.random_() % (most + 1) : most; }

    bool push(std::size_t peer) {
      Queue& queue = out_[peer];
      if (queue.empty()) return false;
      Link& link = network_.link(me_, peer);
      if (link.broken) fail(peer);
      bool moved = false;
      while (!queue.empty() && link.bytes.size() < network_.window_) {
        Transfer& transfer = *queue.front();
        const std::size_t room = network_.window_ - link.bytes.size();
        const std::size_t n = some(std::min(transfer.bytes - transfer.moved, room));
        if (n == 0) break;
        const char* from = transfer.data + transfer.moved;
        link.bytes.insert(link.bytes.end(), from, from + n);
        sent_ += n;
        transfer.moved += n;
        if (transfer.moved == transfer.bytes) {
          queue.pop_front();
          taken_[peer].push_back({&transfer, {transfer.data, transfer.data + transfer.bytes}});
        }
        moved = true;
      }
      return moved;
    }

    // A transport may read the bytes of a send until it reports the send as done.
    bool complete(std::size_t peer) {
      auto& taken = taken_[peer];
      bool moved = false;
      for (; !taken.empty() && network_.random_() % 2 == 0; taken.pop_front()) {
        const auto& [transfer, bytes] = taken.front();
        CHECK(std::memcmp(transfer->data, bytes.data(), bytes.size()) == 0);
        moved = transfer->done = true;
      }
      return moved;
    }

    bool pull(std::size_t peer) {
      Queue& queue = in_[peer];
      Link& link = network_.link(peer, me_);
      bool moved = false;
      while (!queue.empty() && link.readable > 0) {
        Transfer& transfer = *queue.front();
        CHECK(transfer.bytes == link.lengths.front());
        const std::size_t n = some(std::min(transfer.bytes - transfer.moved, link.readable));
        if (n == 0) break;
        std::memcpy(transfer.data + transfer.moved, link.bytes.data(), n);
        link.bytes.erase(link.bytes.begin(), link.bytes.begin() + static_cast<std::ptrdiff_t>(n));
        link.readable -= n;
        transfer.moved += n;
        transfer.done = transfer.moved == transfer.bytes;
        if (transfer.done) queue.pop_front(), link.lengths.pop_front();
        moved = true;
      }
      if (!queue.empty() && link.broken && link.bytes.empty()) fail(peer);
      return moved;
    }

    [[noreturn]] void fail(std::size_t peer) const { throw Error(Code::rank_failed, "gone", network_.rank_of(peer)); }

    SimulatedNetwork& network_;
    std::size_t me_;
    std::vector<Queue> out_, in_;           // per member, as is taken_
    std::vector<std::deque<Taken>> taken_;  // sends that were transmitted but are not done
    std::uint64_t sent_ = 0;
    std::optional<Error> told_;
  };

  End& transport(std::size_t member) { return *ends_[member]; }

 private:
  struct Link {
    std::vector<char> bytes;  // sent but not received yet; the first `readable` bytes have arrived
    std::size_t readable = 0;
    std::deque<std::size_t> lengths;  // of the messages that are posted but not completely received
    bool broken = false;
  };
  Link& link(std::size_t from, std::size_t to) { return links_[from * members_ + to]; }

  std::size_t members_;
  std::mt19937_64& random_;
  std::size_t window_;  // capacity of a link in bytes
  std::vector<Link> links_;
  std::vector<std::unique_ptr<End>> ends_;
};

}  // namespace ff::hfreduce
