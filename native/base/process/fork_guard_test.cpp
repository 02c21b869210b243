#include "base/process/fork_guard.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>

#include "base/testing/check.hpp"
#include "base/testing/one_thread.hpp"

namespace {

void in_child(const std::function<bool()>& body) {
  const pid_t child = ::fork();
  CHECK(child >= 0);
  if (child == 0) ::_exit(body() ? 0 : 1);
  int status = 0;
  CHECK(::waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

bool is_socket(int fd) {
  int type = 0;
  socklen_t size = sizeof type;
  return ::getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) == 0;
}

// The peer reads the end of the stream as soon as the owner closes, even if forked children are alive.
void a_child_does_not_hold_the_connection() {
  int pair[2], hold[2];
  CHECK(::socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0 && ::pipe(hold) == 0);
  ff::fork_guard::add(pair[0]);
  const pid_t child = ::fork();
  CHECK(child >= 0);
  char byte;
  if (child == 0) {
    ::close(hold[1]);
    const bool gone = !is_socket(pair[0]) && is_socket(pair[1]);
    ::_exit(::read(hold[0], &byte, 1) == 0 && gone ? 0 : 1);  // lives until the parent closes
  }
  CHECK(is_socket(pair[0]));
  CHECK(::send(pair[1], "x", 1, 0) == 1 && ::recv(pair[0], &byte, 1, 0) == 1);
  ff::fork_guard::close(pair[0]);
  CHECK(::recv(pair[1], &byte, 1, 0) == 0);
  ::close(hold[1]);
  int status = 0;
  CHECK(::waitpid(child, &status, 0) == child && status == 0);
  ::close(pair[1]);
  ::close(hold[0]);
}

void what_is_not_guarded_stays() {
  int pair[2];
  CHECK(::socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
  ff::fork_guard::add(pair[0]);
  ff::fork_guard::add(pair[1]);
  ff::fork_guard::remove(pair[1]);
  const unsigned before = ff::fork_guard::generation();
  in_child([&] { return !is_socket(pair[0]) && is_socket(pair[1]) && ff::fork_guard::generation() == before + 1; });
  CHECK(ff::fork_guard::generation() == before);
  ff::fork_guard::close(pair[0]);
  in_child([&] { return is_socket(pair[1]); });
  ::close(pair[1]);
}

}  // namespace

int main() {
  a_child_does_not_hold_the_connection();
  what_is_not_guarded_stays();
}
