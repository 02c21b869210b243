// Groups whose ranks are threads of this process, so that sanitizers see all ranks: every collective on every layout,
// order, priorities, and abort.
#include <sys/socket.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "base/testing/check.hpp"
#include "hfreduce/engine/arena.hpp"
#include "hfreduce/engine/group.hpp"

using namespace ff;
using namespace ff::hfreduce;

namespace {

using Groups = std::vector<std::unique_ptr<Group>>;
using Sizes = std::vector<std::size_t>;  // ranks of each host

std::unique_ptr<Team> make_team(const Segment& control, std::vector<Member> members, std::size_t me) {
  if (members.size() == 1) return nullptr;
  return std::make_unique<Team>(Segment::attach(::dup(control.fd())), std::move(members), me, false);
}

// Makes the groups of all ranks, host by host; links every pair of ranks of different hosts both ways.
Groups make_world(const Sizes& sizes, double timeout_s = 60) {
  Layout layout;
  int world = 0;
  for (const std::size_t size : sizes) {
    layout.zones.push_back(static_cast<std::uint32_t>(layout.hosts.size()));
    auto& host = layout.hosts.emplace_back();
    for (std::size_t m = 0; m < size; ++m) host.push_back(world++);
  }
  Groups groups(static_cast<std::size_t>(world));
  for (std::size_t h = 0; h < sizes.size(); ++h) {
    const std::size_t size = sizes[h];
    std::vector<std::vector<Member>> team(size, std::vector<Member>(size));
    for (std::size_t a = 0; a < size; ++a) {
      for (std::size_t b = 0; b < size; ++b) team[a][b] = {layout.hosts[h][b], -1, -1};
    }
    for (std::size_t a = 0; a < size; ++a) {
      for (std::size_t b = a + 1; b < size; ++b) {
        int pair[2];
        CHECK(::socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
        team[a][b].socket = pair[0];
        team[b][a].socket = pair[1];
      }
    }
    const Segment control = Segment::create("test", Team::control_bytes(size));
    for (std::size_t m = 0; m < size; ++m) {
      layout.host = h;
      layout.place = m;
      const int rank = layout.hosts[h][m];
      groups[static_cast<std::size_t>(rank)] =
          std::make_unique<Group>(Group::Config{rank, world, timeout_s, layout}, make_team(control, team[m], m));
    }
  }
  for (int a = 0; a < world; ++a) {
    for (int b = 0; b < world; ++b) {
      if (a == b || layout.find(a).first == layout.find(b).first) continue;
      int pair[2];
      CHECK(::socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
      groups[static_cast<std::size_t>(a)]->add_outgoing(b, pair[0]);
      groups[static_cast<std::size_t>(b)]->add_incoming(a, pair[1]);
    }
  }
  return groups;
}

void on_every_rank(Groups& groups, const std::function<void(std::size_t, Group&)>& body) {
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < groups.size(); ++r) {
    threads.emplace_back([&, r] { body(r, *groups[r]); });
  }
  for (auto& thread : threads) thread.join();
}

// Floats, inside or outside the arena.
class Tensor {
 public:
  Tensor(std::size_t count, bool zero_copy) : count_(count), zero_copy_(zero_copy) {
    if (zero_copy) data_ = reinterpret_cast<float*>(Arena::of_process().allocate(count * 4));
    if (!zero_copy) data_ = new float[count];
    for (std::size_t i = 0; i < count; ++i) data_[i] = -1;
  }
  ~Tensor() { zero_copy_ ? Arena::of_process().release(reinterpret_cast<char*>(data_)) : delete[] data_; }
  Tensor(const Tensor&) = delete;

  float& operator[](std::size_t i) { return data_[i]; }
  Pieces whole() const { return {{reinterpret_cast<char*>(data_), count_ * 4}}; }
  Pieces pieces(std::size_t parts) const {
    Pieces row;
    for (std::size_t p = 0; p < parts; ++p) {
      row.push_back({reinterpret_cast<char*>(data_ + count_ / parts * p), count_ / parts * 4});
    }
    return row;
  }

 private:
  std::size_t count_;
  bool zero_copy_;
  float* data_;
};

Request make(Kind kind, std::size_t count, Pieces in, Pieces out, int root = -1) {
  Request request;
  request.call.kind = kind;
  request.call.count = count;
  request.call.dtype = DType::f32;
  request.call.root = root;
  request.in = std::move(in);
  request.out = std::move(out);
  return request;
}

void finish(Group& group, Request request, bool here) {
  const auto operation = group.submit(std::move(request), here);
  CHECK(operation->wait(-1));
  operation->rethrow();
}

void every_collective(const Sizes& sizes, std::size_t count) {
  auto groups = make_world(sizes);
  const std::size_t world = groups.size();
  on_every_rank(groups, [&](std::size_t rank, Group& group) {
    const auto mine = static_cast<float>(rank);
    const float sum = static_cast<float>(world * (world - 1)) / 2;
    const int root = static_cast<int>(world) - 1;
    const bool is_root = static_cast<int>(rank) == root;
    for (const int kind_of_memory : {0, 1, 2}) {
      const bool zero_copy = kind_of_memory == 1 || (kind_of_memory == 2 && rank % 2 == 0);
      const bool here = kind_of_memory == 0;
      Tensor one(count, zero_copy), all(count * world, zero_copy), from(count * world, zero_copy);
      const auto fill = [&](Tensor& tensor, std::size_t n, float value) {
        for (std::size_t i = 0; i < n; ++i) tensor[i] = value;
      };
      fill(one, count, mine);
      finish(group, make(Kind::allreduce, count, one.whole(), one.whole()), here);
      for (std::size_t i = 0; i < count; ++i) CHECK(one[i] == sum);

      fill(one, count, mine);
      finish(group, make(Kind::reduce, count, one.whole(), is_root ? one.whole() : Pieces{}, root), here);
      for (std::size_t i = 0; i < count; ++i) CHECK(one[i] == (is_root ? sum : mine));

      fill(one, count, mine);
      finish(group,
             make(Kind::broadcast, count, is_root ? one.whole() : Pieces{}, is_root ? Pieces{} : one.whole(), root),
             here);
      for (std::size_t i = 0; i < count; ++i) CHECK(one[i] == static_cast<float>(root));

      fill(one, count, mine);
      finish(group, make(Kind::all_gather, 0, one.whole(), all.pieces(world)), here);
      for (std::size_t i = 0; i < count * world; ++i) CHECK(all[i] == static_cast<float>(i / count));

      for (std::size_t i = 0; i < count * world; ++i) from[i] = mine * 100 + static_cast<float>(i / count);
      finish(group, make(Kind::all_to_all, 0, from.pieces(world), all.pieces(world)), here);
      for (std::size_t i = 0; i < count * world; ++i) {
        CHECK(all[i] == static_cast<float>(i / count) * 100 + mine);
      }
      finish(group, make(Kind::reduce_scatter, count, from.pieces(world), one.whole()), here);
      for (std::size_t i = 0; i < count; ++i) {
        CHECK(one[i] == sum * 100 + mine * static_cast<float>(world));
      }
      for (const Codec wire : {Codec::bf16, Codec::fp16}) {  // small whole numbers: nothing is rounded
        for (std::size_t i = 0; i < count * world; ++i) from[i] = mine;
        Request coded = make(Kind::reduce_scatter, count, from.pieces(world), one.whole());
        coded.call.wire = wire;
        finish(group, std::move(coded), here);
        for (std::size_t i = 0; i < count; ++i) CHECK(one[i] == sum);
      }
      for (std::size_t i = 0; i < count * world; ++i) from[i] = mine * 100 + static_cast<float>(i / count);
      finish(group, make(Kind::scatter, count, is_root ? from.pieces(world) : Pieces{}, one.whole(), root), here);
      for (std::size_t i = 0; i < count; ++i) CHECK(one[i] == static_cast<float>(root) * 100 + mine);

      fill(one, count, mine);
      finish(group, make(Kind::gather, 0, one.whole(), is_root ? all.pieces(world) : Pieces{}, root), here);
      for (std::size_t i = 0; is_root && i < count * world; ++i) CHECK(all[i] == static_cast<float>(i / count));

      finish(group, make(Kind::barrier, 0, {}, {}), here);

      fill(one, count, mine);
      Request shared = make(Kind::allreduce, count, one.whole(), {});
      shared.call.shared = 1;
      const auto operation = group.submit(std::move(shared), here);
      CHECK(operation->wait(-1));
      operation->rethrow();
      const auto* result = reinterpret_cast<const float*>(operation->shared->data());
      for (std::size_t i = 0; i < count; ++i) CHECK(result[i] == sum && one[i] == mine);
    }
  });
}

// Ends all groups with the first error that one of them announces, like the watch between processes.
class Herald {
 public:
  explicit Herald(Groups& groups) {
    for (auto& group : groups) {
      group->set_announcer([this, &groups](const Error& error) {
        const Error first = first_after(error);
        for (auto& other : groups) other->fail(first);
        return first;
      });
    }
  }

 private:
  Error first_after(const Error& error) {
    const std::lock_guard lock(mutex_);
    if (!first_) first_ = error;
    return *first_;
  }

  std::mutex mutex_;
  std::optional<Error> first_;
};

struct Mismatch {
  Kind kind;
  // True: one rank expects less from one other rank. False: the last rank sends more to all ranks, and expects more from
  // all ranks.
  bool one_pair;
  bool zero_copy;
};

// No rank may succeed or read bytes outside the given pieces, and no byte of a mismatched piece is written.
void lengths_that_differ_end_the_call_on_every_rank(const Sizes& sizes, std::size_t count, const Mismatch& what) {
  auto groups = make_world(sizes);
  Herald herald(groups);
  const std::size_t world = groups.size(), last = world - 1;
  const bool gather = what.kind == Kind::gather;
  const std::size_t picky = gather ? 0 : last, other = last - picky;  // rank that expects less; its sender
  on_every_rank(groups, [&](std::size_t rank, Group& group) {
    const std::size_t mine = count + (!what.one_pair && rank == last ? 1 : 0);
    const bool exchange = what.kind == Kind::all_to_all, takes = !gather || rank == 0;
    Tensor in(exchange ? mine * world : mine, what.zero_copy), out(takes ? mine * world : 1, what.zero_copy);
    for (std::size_t i = 0; i < mine; ++i) in[i] = 1;
    Pieces pieces = takes ? out.pieces(world) : Pieces{};
    if (what.one_pair && rank == picky) pieces[other].bytes -= 4;
    const auto operation = group.submit(
        make(what.kind, 0, exchange ? in.pieces(world) : in.whole(), std::move(pieces), gather ? 0 : -1), true);
    CHECK(operation->wait(-1));
    bool told = false;
    try {
      operation->rethrow();
    } catch (const Error& error) {
      told = error.code() == Code::collective && std::strstr(error.what(), "ranks disagree: in ") != nullptr;
    }
    CHECK(told);
    const bool checked = what.one_pair ? rank == picky : takes && rank == 0;
    const std::size_t bad = what.one_pair ? other : last;
    for (std::size_t i = 0; checked && i < mine; ++i) CHECK(out[bad * mine + i] == -1);
  });
  for (auto& group : groups) CHECK(group->failure());
}

void lengths_that_differ(const Sizes& sizes) {
  for (const Kind kind : {Kind::all_gather, Kind::gather, Kind::all_to_all}) {
    for (const bool one_pair : {false, true}) {
      for (const bool zero_copy : {false, true}) {
        for (const std::size_t count : {1, 100'000}) {
          lengths_that_differ_end_the_call_on_every_rank(sizes, count, {kind, one_pair, zero_copy});
        }
      }
    }
  }
}

// Every rank's piece has its own length; some are empty.
void uneven_pieces_arrive(const Sizes& sizes) {
  auto groups = make_world(sizes);
  const std::size_t world = groups.size();
  on_every_rank(groups, [&](std::size_t rank, Group& group) {
    for (const std::size_t scale : {1, 40'000}) {
      const bool zero_copy = rank % 2 == 0;
      const auto length = [&](std::size_t from) { return scale * ((from + 1) % world); };
      std::size_t total = 0;
      for (std::size_t r = 0; r < world; ++r) total += length(r);
      Tensor in(length(rank), zero_copy), out(total, zero_copy);
      for (std::size_t i = 0; i < length(rank); ++i) in[i] = static_cast<float>(rank);
      Pieces pieces;
      for (std::size_t r = 0, before = 0; r < world; before += length(r++)) {
        pieces.push_back({out.whole()[0].data + before * 4, length(r) * 4});
      }
      const auto check = [&] {
        std::size_t i = 0;
        for (std::size_t r = 0; r < world; ++r) {
          for (std::size_t k = 0; k < length(r); ++k, ++i) {
            CHECK(out[i] == static_cast<float>(r));
            out[i] = -1;
          }
        }
      };
      finish(group, make(Kind::all_gather, 0, in.whole(), pieces), true);
      check();
      const bool root = rank == world - 1;
      finish(group, make(Kind::gather, 0, in.whole(), root ? pieces : Pieces{}, static_cast<int>(world) - 1), true);
      if (root) check();
    }
  });
}

void prioritised_and_plain_operations_mix(const Sizes& sizes) {
  auto groups = make_world(sizes);
  const auto world = static_cast<float>(groups.size());
  on_every_rank(groups, [&](std::size_t, Group& group) {
    std::vector<std::unique_ptr<Tensor>> tensors;
    std::vector<std::shared_ptr<Operation>> operations;
    for (std::size_t i = 0; i < 60; ++i) {
      const std::size_t count = i % 2 ? 10 : 20'000;
      tensors.push_back(std::make_unique<Tensor>(count, i % 3 == 0));
      for (std::size_t k = 0; k < count; ++k) (*tensors[i])[k] = static_cast<float>(i);
      Request request = make(Kind::allreduce, count, tensors[i]->whole(), tensors[i]->whole());
      request.priority = static_cast<int>(i * 7 % 5);
      operations.push_back(group.submit(std::move(request), false));
    }
    for (std::size_t i = 0; i < operations.size(); ++i) {
      operations[i]->wait(-1);
      operations[i]->rethrow();
      CHECK((*tensors[i])[0] == world * static_cast<float>(i));
    }
  });
}

void a_missing_rank_ends_by_timeout_and_abort(const Sizes& sizes) {
  auto groups = make_world(sizes, 0.2);
  Tensor data(100'000, false);
  const auto call = [&] { return make(Kind::allreduce, 100'000, data.whole(), data.whole()); };
  const auto operation = groups[0]->submit(call(), false);
  CHECK(operation->wait(-1));
  bool failed = false;
  try {
    operation->rethrow();
  } catch (const Error& error) {
    failed = error.code() == Code::rank_failed && error.rank() > 0;
  }
  CHECK(failed && groups[0]->failure());
  // Another rank of the host fails at once, regardless of its timeout; a rank of another host fails through its watch.
  groups[1]->set_timeout(sizes.size() == 1 ? 60 : 0.2);
  CHECK(groups[1]->submit(call(), true)->done());
  CHECK(groups[1]->failure());
}

void a_waiting_operation_is_ended(bool by_destruction) {
  auto groups = make_world({2});
  Tensor data(100'000, false);
  const auto operation = groups[0]->submit(make(Kind::allreduce, 100'000, data.whole(), data.whole()), false);
  by_destruction ? groups[0].reset() : groups[0]->abort();
  CHECK(operation->wait(-1));
}

void freed_blocks_join() {
  Arena& arena = Arena::of_process();
  std::vector<char*> blocks;
  for (std::size_t i = 0; i < 100; ++i) blocks.push_back(arena.allocate(1000 + 997 * i));
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
  for (const Sizes& sizes : {Sizes{1}, {2}, {4}, {1, 1}, {2, 2}, {3, 1}, {1, 1, 1}}) {
    for (const std::size_t count : {1, 3000, FF_THREAD_SANITIZER ? 30'001 : 70'001}) every_collective(sizes, count);
  }
  for (const Sizes& sizes : {Sizes{1}, {3}, {2, 1}}) prioritised_and_plain_operations_mix(sizes);
  for (const Sizes& sizes : {Sizes{2}, {4}, {1, 1}, {2, 2}, {2, 1}, {1, 3}}) {
    lengths_that_differ(sizes);
    uneven_pieces_arrive(sizes);
  }
  a_missing_rank_ends_by_timeout_and_abort({2});
  a_missing_rank_ends_by_timeout_and_abort({1, 1});
  a_waiting_operation_is_ended(true);
  a_waiting_operation_is_ended(false);
}
