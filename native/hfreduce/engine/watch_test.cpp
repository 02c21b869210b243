#include "hfreduce/engine/watch.hpp"

#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <utility>

#include "base/testing/check.hpp"

namespace {

using ff::Code;
using ff::Error;
using ff::hfreduce::Watch;

constexpr double kTimeout = 30;

std::pair<int, int> socket_pair() {
  int pair[2];
  CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
  return {pair[0], pair[1]};
}

// Watches of ranks linked in a row, 0 - 1 - 2 - ...: a notice from rank 0 reaches the last rank over all links.
struct Row {
  explicit Row(int world) {
    for (int r = 0; r < world; ++r) watches.push_back(std::make_unique<Watch>(r, world));
    for (int r = 0; r + 1 < world; ++r) {
      const auto [a, b] = socket_pair();
      watches[r]->add_link(r + 1, a);
      watches[r + 1]->add_link(r, b);
    }
  }
  Watch& operator[](int r) { return *watches[r]; }
  std::vector<std::unique_ptr<Watch>> watches;
};

Error failure_of(Watch& watch) {
  CHECK(watch.wait(kTimeout));
  return *watch.failure();
}

void a_death_is_reported_to_all() {
  Row row(4);
  row.watches[0].reset();
  for (int r = 1; r < 4; ++r) {
    const Error error = failure_of(row[r]);
    CHECK(error.code() == Code::rank_failed && error.rank() == 0);
    CHECK(row[r].failed_ranks() == std::set<int>{0});
  }
}

void leaving_is_no_failure() {
  Row row(3);
  row[0].leave();
  row.watches[0].reset();
  while (row[2].left_ranks() != std::set<int>{0}) std::this_thread::yield();
  row[1].leave();
  row.watches[1].reset();
  row[2].leave();
  CHECK(!row[2].failure() && row[2].failed_ranks().empty());
}

void every_rank_learns_once_of_a_withdrawal() {
  Row row(4);
  std::atomic<int> notified = 0;
  for (int r = 0; r < 4; ++r) {
    row[r].listen({nullptr, nullptr, [&](std::uint64_t operation) {
                     CHECK(operation == 7);
                     ++notified;
                     notified.notify_all();
                   }});
  }
  row[3].withdraw(7);
  row[0].withdraw(7);
  for (int seen = notified; seen < 4; seen = notified) notified.wait(seen);
  for (int r = 0; r < 4; ++r) row[r].leave();
  row.watches[0].reset();
  CHECK(notified == 4);
}

void all_may_leave_at_once() {
  Row row(4);
  std::vector<std::thread> threads;
  for (int r = 0; r < 4; ++r) {
    threads.emplace_back([&row, r] {
      row[r].leave();
      CHECK(!row[r].failure());
    });
  }
  for (auto& thread : threads) thread.join();
}

void an_announced_error_is_the_same_everywhere_and_the_first_counts() {
  Row row(3);
  const std::string text = "ranks disagree: rank 0 calls " + std::string(2000, 'x');
  const Error mine = row[0].announce(Error(Code::collective, text));
  CHECK(mine.what() == text.substr(0, Watch::kTextBytes));
  const Error theirs = failure_of(row[2]);
  CHECK(theirs.code() == Code::collective && theirs.rank() == -1);
  CHECK(std::string(theirs.what()) == mine.what());
  const Error late = row[2].announce(Error(Code::rank_failed, "rank 1 did not join", 1));
  CHECK(std::string(late.what()) == mine.what());
  CHECK(row[2].failed_ranks().empty());
  const std::string umlauts = "\xc3\xa4";  // a character is not cut in two
  const Error cut = Watch(0, 1).announce(Error(Code::collective, std::string(1023, 'x') + umlauts));
  CHECK(std::string(cut.what()) == std::string(1023, 'x'));
}

void a_blame_gives_way_to_what_is_known_already() {
  Row row(3);
  row.watches[0].reset();
  const Error dead = row[1].announce(Error(Code::rank_failed, "rank 2 died or left the group", 2));
  CHECK(dead.rank() == 0);
  Row other(3);
  other[0].leave();
  const Error gone = other[1].announce(Error(Code::rank_failed, "rank 0 died or left the group", 0));
  CHECK(gone.rank() == 0 && std::string(gone.what()) == "rank 0 left the group");
  CHECK(std::string(failure_of(other[2]).what()) == gone.what());
}

void one_call_fails_for_the_reason_of_the_group_or_its_own() {
  Row row(3);
  row.watches[0].reset();
  CHECK(row[1].verdict(Error(Code::rank_failed, "rank 2 died or left the group", 2)).rank() == 0);
  Row other(3);
  other[0].leave();
  const Error left = other[1].verdict(Error(Code::rank_failed, "rank 0 died or left the group", 0));
  CHECK(left.rank() == 0 && !other[1].failure());  // the other ranks continue
}

void the_rank_that_waits_for_none_is_blamed() {
  Row row(4);  // rank 0 waits for 1, 1 waits for 2, 2 waits for 3
  std::atomic<int> hurried = 0;
  for (int r = 0; r < 4; ++r) row[r].listen({[&] { ++hurried; }});
  std::vector<std::thread> threads;
  for (const auto& [rank, other] : std::map<int, int>{{0, 1}, {1, 2}, {2, 3}}) {
    threads.emplace_back([&row, rank = rank, other = other] {
      const Error error = row[rank].announce(Error(Code::late, "too late", other));
      CHECK(error.code() == Code::rank_failed && error.rank() == 3);
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(failure_of(row[3]).rank() == 3 && hurried == 4);

  Row circle(3);
  std::thread other([&] { CHECK(circle[1].announce(Error(Code::late, "too late", 0)).rank() == 2); });
  CHECK(circle[0].announce(Error(Code::late, "too late", 1)).rank() == 2);
  other.join();
}

void the_listener_is_told_one_failure_once() {
  Row row(3);
  std::atomic<int> calls = 0;
  row.watches[0].reset();
  const Error first = failure_of(row[1]);
  row[1].listen({nullptr, [&](const Error& error) {
                   CHECK(error.rank() == 0);
                   ++calls;
                   calls.notify_all();
                 }});
  calls.wait(0);
  row.watches[2].reset();
  while (row[1].failed_ranks().size() < 2) std::this_thread::yield();
  row.watches[1].reset();
  CHECK(calls == 1 && first.rank() == 0);
}

void a_link_that_comes_late_learns_what_happened() {
  Watch early(0, 2), late(1, 2);
  early.announce(Error(Code::collective, "the group was aborted"));
  const auto [a, b] = socket_pair();
  late.add_link(0, b);
  early.add_link(1, a);
  CHECK(std::string(failure_of(late).what()) == "the group was aborted");
}

void garbage_fails_its_sender() {
  Watch watch(0, 3);
  const auto [a, b] = socket_pair();
  watch.add_link(2, a);
  const std::string garbage(100, 'G');
  CHECK(::send(b, garbage.data(), garbage.size(), 0) == 100);
  const Error error = failure_of(watch);
  CHECK(error.code() == Code::rank_failed && error.rank() == 2);
  ::close(b);
}

void a_process_is_watched() {
  int hold[2];
  CHECK(::pipe(hold) == 0);
  const pid_t child = ::fork();
  CHECK(child >= 0);
  if (child == 0) {
    ::close(hold[1]);
    char byte;
    [[maybe_unused]] const ssize_t n = ::read(hold[0], &byte, 1);
    ::_exit(0);
  }
  ::close(hold[0]);
  const auto [a, b] = socket_pair();  // `b` stays open in this process, as if a child of the dead process held it
  Watch watch(0, 2);
  watch.add_link(1, a);
  watch.add_process(1, static_cast<int>(::syscall(SYS_pidfd_open, child, 0)));
  CHECK(!watch.wait(0));
  CHECK(::kill(child, SIGKILL) == 0);
  CHECK(failure_of(watch).rank() == 1);
  CHECK(::waitpid(child, nullptr, 0) == child);
  ::close(b);
  ::close(hold[1]);
}

void a_rank_outside_the_group_is_refused() {
  Watch watch(0, 2);
  const auto [a, b] = socket_pair();
  try {
    watch.add_link(2, a);
    CHECK(false);
  } catch (const Error& error) {
    CHECK(error.code() == Code::invalid);
  }
  ::close(a);
  ::close(b);
}

}  // namespace

int main() {
  a_process_is_watched();
  a_death_is_reported_to_all();
  leaving_is_no_failure();
  every_rank_learns_once_of_a_withdrawal();
  all_may_leave_at_once();
  an_announced_error_is_the_same_everywhere_and_the_first_counts();
  a_blame_gives_way_to_what_is_known_already();
  one_call_fails_for_the_reason_of_the_group_or_its_own();
  the_rank_that_waits_for_none_is_blamed();
  the_listener_is_told_one_failure_once();
  a_link_that_comes_late_learns_what_happened();
  garbage_fails_its_sender();
  a_rank_outside_the_group_is_refused();
}
