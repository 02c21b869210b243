// The right to be sent much at once ("request to send" of the paper): so many requests may be under way, in the order
// of asking.
//
// Thread contract: all calls from any thread.
// Invariant: permits held and free are `count` together; whoever waits is told by its eventfd, once.
#pragma once

#include <deque>
#include <mutex>

namespace ff::fs3::io {

class Permits {
 public:
  explicit Permits(unsigned count) : free_(count) {}

  // True: the caller has one. False: it stands in line, and `wake` becomes readable when it has one.
  bool ask(int wake);
  void give_back();
  // Leaves the line. True: it had been given one already, which it has now.
  bool leave(int wake);

 private:
  std::mutex mutex_;
  unsigned free_;
  std::deque<int> line_;
};

}  // namespace ff::fs3::io
