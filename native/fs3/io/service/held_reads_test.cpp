// READs that a connection holds until `go`: bounds, expiry, the end of the connection.
#include "fs3/io/service/held_reads.hpp"

#include "base/testing/check.hpp"
#include "base/testing/one_thread.hpp"

using namespace ff::fs3;
using namespace ff::fs3::io;

namespace {

HeldReads::Read read_of(std::uint64_t request) {
  HeldReads::Read read;
  read.head.request = request;
  read.table.resize(sizeof(ReadEntry));
  read.readings.resize(1);
  read.targets.resize(1);
  return read;
}

void each_is_taken_once_and_only_when_it_is_ready() {
  HeldReads holding;
  CHECK(!holding.take(1) && holding.begin(1) && !holding.begin(1) && !holding.take(1) && holding.held() == 0);
  CHECK(holding.keep(read_of(1)) && holding.held() == 1 && !holding.take(2));
  const auto taken = holding.take(1);
  CHECK(taken && taken->head.request == 1 && taken->readings.size() == 1 && holding.held() == 0);
  CHECK(!holding.take(1) && holding.begin(1));
}

void held_reads_are_bounded() {
  HeldReads holding;
  for (std::uint64_t n = 0; n < HeldReads::kMostFrames; ++n) CHECK(holding.begin(n));
  CHECK(!holding.begin(99));
  CHECK(holding.keep(read_of(3)) && !holding.begin(99) && holding.take(3) && holding.begin(99));
}

void what_is_held_too_long_is_to_be_read_again() {
  HeldReads holding;
  CHECK(holding.begin(1) && holding.keep(read_of(1)) && holding.begin(2));
  holding.expire(HeldReads::Clock::now());
  CHECK(holding.held() == 1);
  holding.expire(HeldReads::Clock::now() + HeldReads::kTime + std::chrono::seconds(1));
  holding.expire(HeldReads::Clock::now() + 2 * HeldReads::kTime);
  const auto taken = holding.take(1);
  CHECK(taken && taken->readings.empty() && taken->table.size() == sizeof(ReadEntry));
  CHECK(holding.keep(read_of(2)) && !holding.take(2)->readings.empty());
}

void clear_drops_all_reads() {
  HeldReads holding;
  CHECK(holding.begin(1) && holding.begin(2) && holding.keep(read_of(1)));
  holding.clear();
  CHECK(holding.held() == 0 && !holding.keep(read_of(2)) && !holding.begin(3) && !holding.take(1));
}

}  // namespace

int main() {
  each_is_taken_once_and_only_when_it_is_ready();
  held_reads_are_bounded();
  what_is_held_too_long_is_to_be_read_again();
  clear_drops_all_reads();
}
