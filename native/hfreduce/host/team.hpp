// The ranks of one host: a shared control segment, its gates, and the loop that drives a pass over it.
//
// Thread contract: one thread of each rank runs collectives, in the same order on all ranks of the team. abort()
// may be called from any thread.
//
// The work of an operation is a sequence of steps, driven through three gates (waiting.hpp). Step numbers continue over
// operations, so nothing is ever reset:
//   in       step k opens when every member has made its input of step k readable
//   reduced  step k opens when every member has consumed all input of step k
//   out      step k opens when every member has taken its results of step k (separate numbering: only passes that use
//            the result ring advance it)
// A tensor inside an arena is read and written in place. Any other tensor goes through rank r's staging ring and the
// common result ring, kDepth chunks each:
//   stage[r][step % kDepth] is refilled once reduced[step - kDepth] is open
//   result[step % kDepth]   is refilled once out[step - kDepth] is open
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/memory/segment.hpp"
#include "hfreduce/host/waiting.hpp"
#include "hfreduce/types.hpp"

namespace ff::hfreduce {

inline constexpr std::size_t kMembers = 64;             // maximum number of ranks of one host
inline constexpr std::uint32_t kDepth = 8;              // chunks in flight
inline constexpr std::size_t kChunkBytes = 256u << 10;  // bytes of one staging slot

// A member of the team; members are listed in team order.
struct Member {
  int rank;     // in the group
  int socket;   // Unix socket to the member, for segment descriptors; EOF means that it left; -1 for this member itself
  int process;  // pidfd, or -1: reports the member's death even if a child process still holds the socket
};

// A member's description of its part in an operation, read by the other members.
struct Posted {
  Call call;
  Place in, out;
  bool copies;  // for passes that copy: the arrays below are valid
  // Bytes for each reader. At `in` lies one part that all readers read, or adjacent parts, one per reader.
  std::uint64_t gives[kMembers];
  std::uint64_t takes[kMembers];  // bytes expected from each member
};

// The data movement of one operation. The team calls publish, consume and collect for steps 0, 1, ... each.
class Pass {
 public:
  virtual ~Pass() = default;
  // Called after every member has posted: decides what depends on the other members, with the same result on all
  // members.
  virtual void settle() = 0;
  virtual void publish(std::uint32_t step) = 0;  // writes the input of a step into the staging slot
  virtual void consume(std::uint32_t step) = 0;  // called when all members' input of a step is there
  virtual void collect(std::uint32_t) {}         // called when all members' result of a step is there
  // For legs between hosts. ready: this step may be published. busy: the network needs this thread. idle: does work for
  // the network.
  virtual bool ready(std::uint32_t) { return true; }
  virtual bool busy() { return false; }
  virtual void idle() {}

  std::uint32_t steps = 1;
  bool uses_result = false;   // the pass uses the result ring
  bool leaves_early = false;  // once this member has consumed all steps, no member needs this member's memory
};

class Team {
 public:
  // Bytes of the control segment for `members` ranks.
  static std::size_t control_bytes(std::size_t members);

  // Owns sockets and pidfds. `control` is the same segment on all members, zeroed at creation. `spin`: this machine has
  // at least as many cores as ranks.
  Team(Segment control, std::vector<Member> members, std::size_t me, bool spin);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  std::size_t size() const { return members_.size(); }
  std::size_t me() const { return me_; }
  bool spins() const { return spin_; }

  // Calls of an operation, in this order: begin(), then either solo() and finish_solo(), or enter() and then drive() or
  // claim(). Before enter(), the first step is published. After drive() or meet(), again() may drive further passes.
  void begin(const Call& call, Deadline deadline);
  // Posts, waits for all members, and compares the calls. REQUIRES: the input of the first step is readable.
  void enter(const Posted& mine);
  // Drives a pass, whose first `published` steps are published already, to its end.
  void drive(Pass& pass, std::uint32_t published);
  // Like enter(), in a separate step, for operations that begin on the network.
  void meet(const Posted& mine);
  // Drives a further pass of the same operation, over memory that every member has mapped already.
  void again(Pass& pass);
  // Posts; the last member to arrive does `work` for all, while the other members sleep.
  void solo(const Posted& mine, const std::function<void()>& work);
  void finish_solo();  // after the results have been taken from the result ring

  // For passes, while an operation runs.
  const Posted& posted(std::size_t member) const;  // of the last posting
  int rank(std::size_t member) const { return members_[member].rank; }
  const Call& call() const { return call_; }
  char* map(std::size_t member, const Place& place);  // address of a member's zero-copy memory in this process
  std::shared_ptr<Segment> segment(std::size_t member, std::int32_t number);  // of another member
  char* stage(std::size_t member, std::uint32_t step) const;                  // step of the running pass
  char* result(std::uint32_t step) const;

  // Claims part `part` of the slice of `owner`, so that awake members do the work of sleeping ones: parts of this
  // member's slice first, then of the other members' slices. Each slice has `parts_each` parts. Returns false when no
  // part is left. REQUIRES: every member has posted.
  bool claim(std::size_t parts_each, std::size_t& owner, std::size_t& part);
  // Reports that `parts` more of all `of` parts are complete. The last report opens the reduced gate.
  void completed(std::size_t parts, std::size_t of);
  void wait_completed();

  // The order of prioritised operations: one member publishes the number of the next operation, and each other member
  // reads it, once per operation.
  void publish_next(std::uint64_t number);
  std::uint64_t await_next(Deadline deadline);

  // Ends every wait of this rank and of the other ranks of this host, because of `rank`. Any thread.
  void abort(int rank);

 private:
  struct Header;
  struct Slot;

  void post(const Posted& mine);
  void compare_posts();
  void announce(std::int32_t segment);
  enum class Counter { in, reduced, out };
  void arrive(Counter counter, std::uint32_t first, std::uint32_t last);
  void wait(Counter counter, std::uint32_t step);  // until `step` is open
  Gate& gate(Counter counter);
  void check_failures();
  [[noreturn]] void fail_deadline(Counter counter, std::uint32_t step);

  Segment control_;
  Header* header_;
  Slot* slots_;
  std::vector<Member> members_;
  std::size_t me_;
  bool spin_;
  WaitPolicy wait_policy_;

  // State of the running operation; used by its thread only.
  std::uint32_t step_ = 0;         // first step of the running pass
  std::uint32_t result_step_ = 0;  // first step in the numbering of the result ring
  std::uint32_t decisions_ = 0;    // number of decisions published or read
  std::uint32_t posts_ = 0;        // number of postings of this member
  Call call_{};

  std::vector<std::int32_t> announced_;                               // own segments that the peers have
  std::vector<std::vector<std::shared_ptr<Segment>>> peer_segments_;  // [member][segment]
};

}  // namespace ff::hfreduce
