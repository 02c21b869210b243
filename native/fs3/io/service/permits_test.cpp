// Permits for large transfers: bounds, order, direct answers, and no starvation.
#include "fs3/io/service/permits.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <random>
#include <thread>
#include <vector>

#include "base/testing/check.hpp"

using namespace ff::fs3::io;

namespace {

struct Wake {
  Wake() { CHECK(fd >= 0); }
  ~Wake() { ::close(fd); }
  std::uint64_t told() const {
    eventfd_t count = 0;
    return ::eventfd_read(fd, &count) == 0 ? count : 0;
  }
  const int fd = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
};

void grants_come_in_the_order_of_asking_and_never_too_many() {
  Permits permits(2);
  const std::array<Wake, 3> wake;
  CHECK(permits.ask(wake[0].fd) && permits.ask(wake[1].fd));
  CHECK(!permits.ask(wake[2].fd) && !permits.ask(wake[0].fd) && !permits.ask(wake[2].fd) && permits.used() == 2);
  permits.give_back();
  CHECK(wake[2].told() == 1 && wake[0].told() == 0 && permits.used() == 2);
  permits.give_back();
  permits.give_back();
  CHECK(wake[0].told() == 1 && wake[2].told() == 1 && permits.used() == 2);
  permits.give_back();
  permits.give_back();
  CHECK(permits.used() == 0 && permits.most() == 2);
}

void leaving_returns_the_unread_grants() {
  Permits permits(1);
  const Wake first, second;
  CHECK(permits.ask(first.fd) && !permits.ask(second.fd) && !permits.ask(second.fd) && !permits.ask(first.fd));
  permits.give_back();  // granted to `second`, which does not read its eventfd
  CHECK(permits.leave(second.fd) == 1 && second.told() == 0 && first.told() == 0);
  permits.give_back();
  CHECK(first.told() == 1 && permits.leave(first.fd) == 0);
  permits.give_back();
  CHECK(permits.used() == 0);
}

void few_nodes_send_without_asking() {
  Permits permits(2);
  const std::array<std::uint32_t, 2> few{1, 2};
  const std::array<std::uint32_t, 2> more{2, 3};
  permits.join(few);
  CHECK(permits.direct(1) && permits.direct(1) && permits.direct(2) && permits.used() == 2);
  CHECK(!permits.direct(3));  // not announced by `join`
  permits.join(more);
  CHECK(!permits.direct(1) && !permits.direct(3));  // three nodes
  permits.over(1);
  CHECK(permits.used() == 2);
  permits.over(1);
  CHECK(permits.used() == 1);
  permits.part(more);
  CHECK(permits.direct(2) && permits.direct(1));
  for (const std::uint32_t node : {1, 2, 2}) permits.over(node);
  permits.part(few);
  CHECK(permits.used() == 0 && permits.most() == 2 && !permits.direct(1));
}

// A node that is asked again and again must not starve other nodes.
void no_direct_answer_is_granted_while_an_answer_waits() {
  Permits permits(1);
  const Wake wake;
  const std::array<std::uint32_t, 1> node{5};
  permits.join(node);
  CHECK(permits.direct(5) && !permits.ask(wake.fd) && !permits.direct(5));
  permits.over(5);
  CHECK(wake.told() == 1 && !permits.direct(5));
  permits.give_back();
  CHECK(permits.direct(5));
  permits.part(node);
  permits.over(5);
  CHECK(permits.used() == 0);
}

void threads_share_them() {
  Permits permits(3);
  std::atomic<int> sending = 0;
  std::vector<std::thread> threads;
  for (std::uint32_t n = 0; n < 6; ++n) {
    threads.emplace_back([&, n] {
      const Wake wake;
      const std::array<std::uint32_t, 1> node{n % 4};
      std::mt19937 random(n);
      for (int round = 0; round < 2000; ++round) {
        permits.join(node);
        const bool direct = permits.direct(node[0]);
        if (!direct && !permits.ask(wake.fd)) {
          if (random() % 4 == 0) {
            if (permits.leave(wake.fd) != 0) permits.give_back();
            permits.part(node);
            continue;
          }
          while (wake.told() == 0) std::this_thread::yield();
        }
        if (!direct) CHECK(++sending <= 3);
        if (!direct) --sending;
        if (direct) permits.over(node[0]);
        else permits.give_back();
        permits.part(node);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(permits.used() == 0 && permits.most() <= 3);
}

}  // namespace

int main() {
  grants_come_in_the_order_of_asking_and_never_too_many();
  leaving_returns_the_unread_grants();
  few_nodes_send_without_asking();
  no_direct_answer_is_granted_while_an_answer_waits();
  threads_share_them();
}
