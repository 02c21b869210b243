// For all sizes, thread counts and modes: exactly the pieces' bytes are written, a prefix that is reported as in place
// is in place, and changed pieces are reported. A destroyed copy accesses no source; a forked child does not wait for
// its parent.
#include "checkpoint/copy.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "base/memory/stream_copy.hpp"
#include "base/testing/check.hpp"
#include "base/testing/test_bytes.hpp"

namespace {

using ff::checkpoint::Arena;
using ff::checkpoint::Copy;
using ff::checkpoint::CopyOptions;
using ff::checkpoint::Memory;
using ff::checkpoint::Piece;

constexpr char kUntouched = 0x55;

// Pieces of many sizes with gaps between them, and their source tensors.
struct State {
  std::vector<std::vector<char>> tensors;
  std::vector<Piece> pieces;
  std::size_t end = 0;

  State(std::size_t count, std::size_t most, unsigned seed) {
    std::mt19937 random(seed);
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t bytes = random() % 4 == 0 ? random() % 100 : random() % most;
      std::vector<char>& tensor = tensors.emplace_back(bytes + 1);  // an unaligned source
      ff::fill_random(tensor.data(), tensor.size(), random());
      end += random() % 3 == 0 ? random() % 100 : 0;
      pieces.push_back({tensor.data() + 1, end, bytes});
      end += bytes;
    }
  }

  bool holds(const char* arena, std::size_t upto) const {
    for (const Piece& piece : pieces) {
      if (piece.offset >= upto) break;
      if (std::memcmp(arena + piece.offset, piece.source, std::min(piece.bytes, upto - piece.offset)) != 0)
        return false;
    }
    return true;
  }

  bool gaps_untouched(const char* arena, std::size_t size) const {
    std::size_t at = 0;
    for (const Piece& piece : pieces) {
      if (!ff::all_are(arena + at, piece.offset - at, kUntouched)) return false;
      at = piece.offset + piece.bytes;
    }
    return ff::all_are(arena + at, size - at, kUntouched);
  }
};

void all_sizes() {
  std::vector<char> from(70000), to(70000);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<char>(i * 7 + i / 256);
  for (const std::size_t bytes : {0, 1, 63, 64, 65, 4095, 4096, 4097, 5000, 16384, 16385, 65537}) {
    for (const std::size_t skew : {0, 1, 31, 63}) {
      std::fill(to.begin(), to.end(), kUntouched);
      ff::stream_copy(to.data() + skew, from.data() + 3, bytes);
      ff::stream_fence();
      CHECK(std::memcmp(to.data() + skew, from.data() + 3, bytes) == 0);
      CHECK(to[skew + bytes] == kUntouched && (skew == 0 || to[skew - 1] == kUntouched));
      CHECK(!ff::stream_update(to.data() + skew, from.data() + 3, bytes));
      if (bytes == 0) continue;
      to[skew + bytes / 2] = static_cast<char>(to[skew + bytes / 2] ^ 1);
      CHECK(ff::stream_update(to.data() + skew, from.data() + 3, bytes));
      CHECK(std::memcmp(to.data() + skew, from.data() + 3, bytes) == 0);
    }
  }
}

void every_mode() {
  Arena arena;
  arena.reserve(8 << 20);
  const auto memory = arena.memory();
  CHECK(memory->size() == 8 << 20);
  unsigned seed = 0;
  for (const unsigned threads : {0u, 1u, 2u, 5u}) {
    for (const std::size_t block : {std::size_t{1}, std::size_t{1000}, std::size_t{4096}, std::size_t{1} << 20}) {
      for (const bool background : {false, true}) {
        for (const bool compare : {false, true}) {
          const State state(40, block == 1 ? 50 : 60000, ++seed);
          std::memset(memory->data(), kUntouched, memory->size());
          Copy copy(memory, state.pieces,
                    {.threads = threads, .compare = compare, .background = background, .block = block});
          copy.wait(SIZE_MAX, seed % 3 != 0);
          CHECK(copy.done() && copy.staged() == state.end && copy.pieces_done() == state.pieces.size());
          CHECK(state.holds(memory->data(), state.end) && state.gaps_untouched(memory->data(), memory->size()));
        }
      }
    }
  }
}

// Many threads wait for many prefixes. Each thread finds in place the prefix that it waited for, and the prefixes that
// `staged` and `pieces_done` report.
void prefixes() {
  Arena arena;
  arena.reserve(16 << 20);
  const auto memory = arena.memory();
  const State state(300, 90000, 7);
  for (const bool background : {false, true}) {
    std::memset(memory->data(), kUntouched, memory->size());
    Copy copy(memory, state.pieces, {.threads = 3, .background = background, .block = 5000});
    std::vector<std::thread> waiters;
    for (std::size_t w = 0; w < 8; ++w) {
      waiters.emplace_back([&, w] {
        for (std::size_t upto = state.end / 8 * w; upto < state.end; upto += state.end / 3) {
          copy.wait(upto, w % 2 == 0);
          CHECK(copy.staged() >= upto && state.holds(memory->data(), copy.staged()));
          const std::size_t done = copy.pieces_done();
          if (done > 0) {
            const Piece& last = state.pieces[done - 1];
            CHECK(std::memcmp(memory->data() + last.offset, last.source, last.bytes) == 0);
          }
        }
      });
    }
    for (std::thread& waiter : waiters) waiter.join();
    copy.wait(SIZE_MAX, true);
    CHECK(copy.done());
  }
}

void changes() {
  Arena arena;
  arena.reserve(8 << 20);
  const auto memory = arena.memory();
  State state(60, 100000, 3);
  const CopyOptions options{.threads = 3, .compare = true, .block = 30000};
  Copy(memory, state.pieces, options).wait(SIZE_MAX, true);
  std::vector<bool> changed(state.pieces.size());
  for (std::size_t i = 0; i < state.pieces.size(); i += 3) {
    if (state.pieces[i].bytes == 0) continue;
    char& byte = state.tensors[i][1 + (i * 7919) % state.pieces[i].bytes];
    byte = static_cast<char>(byte ^ 0x10);
    changed[i] = true;
  }
  Copy copy(memory, state.pieces, options);
  copy.wait(SIZE_MAX, true);
  for (std::size_t i = 0; i < state.pieces.size(); ++i) CHECK(copy.changed(i) == changed[i]);
  CHECK(state.holds(memory->data(), state.end));
}

void abandoned() {
  Arena arena;
  arena.reserve(32 << 20);
  for (int round = 0; round < 20; ++round) {
    const State state(50, 400000, static_cast<unsigned>(round));
    const Copy copy(arena.memory(), state.pieces, {.threads = 3, .background = round % 2 == 0, .block = 4096});
  }
}

bool refused(const std::shared_ptr<const Memory>& memory, const std::vector<Piece>& pieces) {
  try {
    const Copy copy(memory, pieces, {});
  } catch (const ff::Error& error) {
    return error.code() == ff::Code::invalid;
  }
  return false;
}

void bad_pieces() {
  Arena arena;
  char source[100] = {};
  CHECK(refused(arena.memory(), {{source, 0, 1}}));
  arena.reserve(1);
  const auto memory = arena.memory();
  const std::size_t size = memory->size();
  CHECK(refused(memory, {{source, size, 1}}));
  CHECK(refused(memory, {{source, size - 1, 2}}));
  CHECK(refused(memory, {{source, 1, SIZE_MAX}}));
  CHECK(refused(memory, {{source, 10, 10}, {source, 19, 1}}));
  CHECK(refused(memory, {{nullptr, 0, 1}}));
  CHECK(!refused(memory, {{source, 10, 10}, {nullptr, 20, 0}, {source, size - 1, 1}}));
  CHECK(!refused(memory, {}));
}

void grows() {
  Arena arena;
  CHECK(arena.memory() == nullptr);
  arena.reserve(3 << 20);
  const auto old = arena.memory();
  old->data()[0] = 1;
  arena.reserve(1);
  CHECK(arena.memory() == old);
  arena.reserve(5 << 20);
  CHECK(arena.memory() != old && arena.memory()->size() == 6 << 20 && arena.memory()->data()[0] == 0);
  CHECK(old->data()[0] == 1);
  try {
    arena.reserve(std::size_t{1} << 50);
    CHECK(false);
  } catch (const ff::Error& error) {
    CHECK(error.code() == ff::Code::no_space && arena.memory() == nullptr);
  }
  arena.reserve(1);
  CHECK(arena.memory() != nullptr);
}

void fork_leaves_it() {
  Arena arena;
  arena.reserve(32 << 20);
  const State state(100, 400000, 1);
  Copy copy(arena.memory(), state.pieces, {.threads = 2, .block = 4096});
  const pid_t child = ::fork();
  if (child == 0) {
    int good = 0;
    try {
      copy.wait(SIZE_MAX, true);
    } catch (const ff::Error& error) {
      good = error.code() == ff::Code::cancelled && arena.memory() == nullptr;
    }
    copy.~Copy();
    ::_exit(good == 1 ? 0 : 1);
  }
  copy.wait(SIZE_MAX, true);
  CHECK(state.holds(arena.memory()->data(), state.end));
  int status;
  CHECK(::waitpid(child, &status, 0) == child && status == 0);
}

}  // namespace

int main() {
  all_sizes();
  bad_pieces();
  grows();
  every_mode();
  prefixes();
  changes();
  abandoned();
  fork_leaves_it();
  return 0;
}
