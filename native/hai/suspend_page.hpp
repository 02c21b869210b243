// The page by which the ranks of a node and their supervisor agree on the call of `suspend_requested()` that
// is answered with true.
//
// Thread contract: every method may be called by any thread of any process that mapped the page. A slot's call()
// belongs to one rank; its calls from several threads are numbered in the order of the fetch_add.
//
// Invariants:
//   1. A call that found its slot not frozen is answered false and its number is <= the count that freeze() returns.
//   2. A call that found its slot frozen is not answered before the decision N; then the answer is number >= N.
//   3. The decision is set once, and never to 0.
// With N > every frozen count of the gang, the answer to call k is k >= N on every rank.
//
// Elastic attempts, where a slot may get a newcomer: a slot that is set apart answers false at once, frozen or
// not, and counts nothing (its rank is not where the others are). begin() ends that and says how far the rank is
// to have counted, which is alike on all who are at the same place; such numbers grow with the membership.
//
//   byte 0   u64 magic, u64 slots, u64 decision (0 = none), u32 decided (the futex)
//   byte 64  one slot a rank, 64 bytes: u64 state (bit 63 = frozen, bit 62 = apart, below them the count of calls),
//            u32 flags
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ff::hai {

class SuspendPage {
 public:
  enum Flag : std::uint32_t { told = 1, acknowledged = 2, joined = 4 };
  enum class Wait { decided, interrupted };

  // A new page of `slots` ranks in a memfd that execve does not inherit.
  static SuspendPage create(std::size_t slots);
  // Maps the page behind `fd`, which stays the caller's. Throws Code::corrupted where it is none.
  static SuspendPage map(int fd);

  SuspendPage(SuspendPage&& other) noexcept;
  SuspendPage(const SuspendPage&) = delete;
  SuspendPage& operator=(const SuspendPage&) = delete;
  SuspendPage& operator=(SuspendPage&&) = delete;
  ~SuspendPage();

  // The rank: counts a call and returns its number, from 1; `frozen` says whether it must await the decision. 0 and
  // not frozen where the slot is set apart.
  std::uint64_t begin_call(std::size_t slot, bool& frozen);
  // Blocks until there is a decision; `interrupted` after a signal.
  Wait wait();
  // REQUIRES: decided. Whether call `number` is answered with true; remembers in the slot that it was.
  bool answer(std::size_t slot, std::uint64_t number);
  void acknowledge(std::size_t slot);
  void set_apart(std::size_t slot);
  // The next call has number `count` + 1. `count` is below 2^62.
  void begin(std::size_t slot, std::uint64_t count);
  // The rank, a newcomer, is a member now.
  void join(std::size_t slot);

  // The supervisor: the slot gets a newcomer, which is set apart. REQUIRES: its rank has ended.
  void renew(std::size_t slot);
  // Freezes every slot and returns the counts before; later counts hold unanswered calls too.
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
