// Groups whose ranks are threads of this process: results, order, and ends by abort. For the sanitizers.
#include <sys/socket.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "base/check.hpp"
#include "hfreduce/arena.hpp"
#include "hfreduce/group.hpp"

using namespace ff;
using namespace ff::hfreduce;

namespace {

// `hosts` hosts of `members` ranks, joined by socket pairs.
std::vector<std::unique_ptr<Group>> make_world(std::size_t hosts, std::size_t members,
                                               double timeout_s = 60) {
  const std::size_t world = hosts * members;
  std::vector<std::unique_ptr<Group>> groups(world);
  std::vector<Ring::End> next(world), previous(world);
  for (std::size_t r = 0; hosts > 1 && r < world; ++r) {
    const std::size_t to = (r + members) % world;
    int pair[2];
    CHECK(::socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    next[r] = {pair[0], static_cast<int>(to)};
    previous[to] = {pair[1], static_cast<int>(r)};
  }
  for (std::size_t h = 0; h < hosts; ++h) {
    std::vector<std::vector<Member>> team(members, std::vector<Member>(members));
    for (std::size_t a = 0; a < members; ++a) {
      for (std::size_t b = 0; b < members; ++b) {
        team[a][b].rank = static_cast<int>(h * members + b);
        team[a][b].process = -1;
        if (a == b) team[a][b].socket = -1;
        if (a >= b) continue;
        int pair[2];
        CHECK(::socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
        team[a][b].socket = pair[0];
        team[b][a].socket = pair[1];
      }
    }
    const Segment control = Segment::create("test", Team::control_bytes(members));
    for (std::size_t m = 0; m < members; ++m) {
      const std::size_t r = h * members + m;
      auto local = members > 1 ? std::make_unique<Team>(Segment::attach(::dup(control.fd())),
                                                        team[m], m, false)
                               : nullptr;
      auto ring = hosts > 1 ? std::make_unique<Ring>(next[r], previous[r], h, hosts) : nullptr;
      groups[r] = std::make_unique<Group>(
          Group::Config{static_cast<int>(r), static_cast<int>(world), timeout_s, false, hosts,
                        hosts > 1 ? members : 0},
          std::move(local), std::move(ring));
    }
  }
  return groups;
}

void on_every_rank(std::vector<std::unique_ptr<Group>>& groups,
                   const std::function<void(std::size_t, Group&)>& body) {
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < groups.size(); ++r) {
    threads.emplace_back([&, r] { body(r, *groups[r]); });
  }
  for (auto& thread : threads) thread.join();
}

void sums(std::size_t hosts, std::size_t members) {
  auto groups = make_world(hosts, members);
  const auto world = static_cast<float>(groups.size());
  on_every_rank(groups, [&](std::size_t rank, Group& group) {
    for (const std::size_t count : {1, 3000, 9000, 200'001}) {
      for (const bool shared : {false, true}) {
        std::vector<float> priv(count);
        float* data = priv.data();
        if (shared) {
          data = reinterpret_cast<float*>(Arena::of_process().allocate(count * sizeof(float)));
        }
        std::vector<std::shared_ptr<Operation>> operations;
        for (int repeat = 0; repeat < 3; ++repeat) {
          for (std::size_t i = 0; i < count; ++i) data[i] = static_cast<float>(rank + i % 7);
          const auto operation = group.allreduce(data, count, DType::f32, ReduceOp::avg, repeat == 1);
          CHECK(operation->wait(-1));
          operation->rethrow();
          for (std::size_t i = 0; i < count; ++i) {
            const float expected = (world - 1) / 2 + static_cast<float>(i % 7);
            CHECK(std::abs(data[i] - expected) < 1e-4F);
          }
        }
        if (shared) Arena::of_process().release(reinterpret_cast<char*>(data));
      }
    }
  });
}

void queued_operations_keep_their_order() {
  auto groups = make_world(1, 3);
  on_every_rank(groups, [&](std::size_t, Group& group) {
    std::vector<std::vector<double>> data;
    for (std::size_t i = 0; i < 60; ++i) data.emplace_back(i % 2 ? 10 : 50'000, 1.0);
    std::vector<std::shared_ptr<Operation>> operations;
    for (auto& d : data) {
      operations.push_back(group.allreduce(d.data(), d.size(), DType::f64,
                                           ReduceOp::sum, false));
    }
    for (std::size_t i = 0; i < data.size(); ++i) {
      operations[i]->wait(-1);
      operations[i]->rethrow();
      CHECK(data[i].front() == 3.0 && data[i].back() == 3.0);
    }
  });
}

void a_missing_rank_ends_by_timeout_and_abort(std::size_t hosts, std::size_t members) {
  auto groups = make_world(hosts, members, 0.2);
  std::vector<float> data(100'000);
  const auto operation = groups[0]->allreduce(data.data(), data.size(),
                                              DType::f32, ReduceOp::sum, false);
  CHECK(operation->wait(-1));
  bool failed = false;
  try {
    operation->rethrow();
  } catch (const Error& error) {
    failed = error.code() == Code::rank_failed && error.rank() > 0;
  }
  CHECK(failed);
  // The others learn of it at once, whatever their own timeout says.
  groups[1]->set_timeout(60);
  const auto second = groups[1]->allreduce(data.data(), data.size(),
                                           DType::f32, ReduceOp::sum, true);
  CHECK(second->done());
}

void destruction_ends_a_waiting_operation() {
  auto groups = make_world(1, 2);
  std::vector<float> data(100'000);
  const auto operation = groups[0]->allreduce(data.data(), data.size(),
                                              DType::f32, ReduceOp::sum, false);
  groups[0].reset();
  CHECK(operation->done());
}

void freed_blocks_join() {
  Arena& arena = Arena::of_process();
  std::vector<char*> blocks;
  for (int i = 0; i < 100; ++i) blocks.push_back(arena.allocate(1000 + 997 * i));
  const std::size_t reserved = arena.reserved_bytes();
  for (std::size_t i = 0; i < blocks.size(); i += 2) arena.release(blocks[i]);
  for (std::size_t i = 1; i < blocks.size(); i += 2) arena.release(blocks[i]);
  char* whole = arena.allocate(Arena::kSegmentBytes);
  CHECK(arena.reserved_bytes() == reserved);
  CHECK(arena.find(whole, Arena::kSegmentBytes) && !arena.find(whole, Arena::kSegmentBytes + 1));
  arena.release(whole);
}

}  // namespace

int main() {
  freed_blocks_join();
  sums(1, 1);
  sums(1, 2);
  sums(1, 4);
  sums(2, 1);
  sums(3, 1);
  sums(2, 2);
  queued_operations_keep_their_order();
  a_missing_rank_ends_by_timeout_and_abort(1, 2);
  a_missing_rank_ends_by_timeout_and_abort(2, 1);
  destruction_ends_a_waiting_operation();
}
