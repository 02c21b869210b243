// The page on which the ranks of a node and their supervisor agree which call of `suspend_requested()` is the first to
// return true.
//
// Thread contract: every method may be called by any thread of any process that mapped the page. A slot's call()
// belongs to one rank; its calls from several threads are numbered in the order of the fetch_add.
//
// Invariants:
//   1. A call that found its slot not frozen returns false, and its number is <= the count that freeze() returns.
//   2. A call that found its slot frozen returns only after the decision N; it returns true if its number is >= N.
//   3. The decision is set once, and never to 0.
// Let N exceed every count that freeze() returned on any node. Then call k returns the same on all ranks: true if and
// only if k >= N.
//
// In an elastic attempt a slot may get a new rank, which is not yet at the same step as the other ranks. Such a slot is
// set apart: its calls return false at once, frozen or not, and are not counted. begin() ends this and sets the rank's
// count of calls. The count is equal on all ranks at the same step, and greater in each later membership.
//
//   byte 0   u64 magic, u64 slots, u64 decision (0 = none), u32 decided (the futex)
//   byte 64  one slot per rank, 64 bytes: u64 state (bit 63 = frozen, bit 62 = apart, below them the count of calls),
//            u32 flags
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ff::hai {

class SuspendPage {
 public:
  enum Flag : std::uint32_t {
    told = 1,          // a call of the rank was answered with true
    acknowledged = 2,  // the rank has saved its state and will exit
    joined = 4         // the slot's new rank is a member
  };
  enum class Wait { decided, interrupted };

  // Creates a page of `slots` ranks in a memfd that execve does not inherit.
  static SuspendPage create(std::size_t slots);
  // Maps the page behind `fd`; the caller still owns `fd`. Throws Code::corrupted if the file is not a suspend page.
  static SuspendPage map(int fd);

  SuspendPage(SuspendPage&& other) noexcept;
  SuspendPage(const SuspendPage&) = delete;
  SuspendPage& operator=(const SuspendPage&) = delete;
  SuspendPage& operator=(SuspendPage&&) = delete;
  ~SuspendPage();

  // Called by the rank: counts a call and returns its number, from 1. Sets `frozen` if the call must wait for the
  // decision. Returns 0, not frozen, if the slot is set apart.
  std::uint64_t begin_call(std::size_t slot, bool& frozen);
  // Blocks until there is a decision. Returns `interrupted` after a signal.
  Wait wait();
  // REQUIRES: decided. Returns whether call `number` returns true; records in the slot if it does.
  bool answer(std::size_t slot, std::uint64_t number);
  void acknowledge(std::size_t slot);  // called by the rank: it has saved its state and will exit
  void set_apart(std::size_t slot);    // calls return false and are not counted, until begin()
  // Gives the next call the number `count` + 1. `count` is below 2^62.
  void begin(std::size_t slot, std::uint64_t count);
  // Called by a new rank once it is a member.
  void join(std::size_t slot);

  // Called by the supervisor: prepares the slot for a new rank and sets it apart. REQUIRES: its former rank has ended.
  void renew(std::size_t slot);
  // Freezes every slot and returns their counts of calls at that moment. Later counts include unanswered calls.
  std::vector<std::uint64_t> freeze();
  // Sets the decision unless there is one, wakes the waiting calls, and returns the decision in force.
  std::uint64_t decide(std::uint64_t number);

  std::uint64_t decision() const;
  std::uint64_t count(std::size_t slot) const;
  std::uint32_t flags(std::size_t slot) const;
  std::size_t slots() const;
  int fd() const { return fd_; }  // of a created page; -1 for a mapped one

 private:
  struct Head;
  struct Slot;
  SuspendPage(void* memory, std::size_t bytes, int fd) : memory_(memory), bytes_(bytes), fd_(fd) {}
  Head& head() const;
  Slot& slot(std::size_t index) const;

  void* memory_;
  std::size_t bytes_;
  int fd_;
};

}  // namespace ff::hai
