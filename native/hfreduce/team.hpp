// The ranks of one host: a shared control segment and the chunk pipeline between them.
//
// Thread contract: one thread of each rank runs collectives, in the same order on all ranks of the team. abort()
// may be called from any thread.
//
// The work of an operation is a row of steps. Step counters (in, reduced, out) of every rank only grow and go on
// over operations, so nothing is ever reset:
//   in[r]      steps whose input rank r has made readable
//   reduced[r] steps in which rank r has reduced and published its slice
//   out[r]     steps that rank r has taken all results from
// A tensor inside an arena is read and written where it lies. Any other tensor goes through rank r's staging
// ring and the common result ring, kDepth chunks each:
//   stage[r][step % kDepth]  is refilled once reduced[*] > step - kDepth
//   result[step % kDepth]    is refilled once out[*]     > step - kDepth
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/segment.hpp"
#include "hfreduce/types.hpp"
#include "hfreduce/waiting.hpp"

namespace ff::hfreduce {

inline constexpr std::size_t kMembers = 64;                // ranks of one host at most
inline constexpr std::size_t kDepth = 8;                  // chunks in flight
inline constexpr std::size_t kChunkBytes = 256u << 10;    // of one staging slot
inline constexpr std::size_t kDirectBytes = 32u << 10;    // up to here every rank reduces everything

// Where a rank's tensor lies: in a segment of its arena, or private (segment < 0).
struct Operand {
  char* data = nullptr;
  std::int32_t segment = -1;
  std::uint64_t offset = 0;
};

// A member of the team, by its place in the team.
struct Member {
  int rank;     // in the group
  int socket;   // Unix socket to it, for segment descriptors; its end tells that it left; -1 for oneself
  int process;  // pidfd, or -1: tells of its death even where a child of it still holds the socket
};

class Team {
 public:
  // Bytes of the control segment for `members` ranks.
  static std::size_t control_bytes(std::size_t members);

  // Owns sockets and pidfds. `control` is the same segment on all members, zeroed at creation.
  Team(Segment control, std::vector<Member> members, std::size_t me, bool spin);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  std::size_t size() const { return members_.size(); }
  std::size_t me() const { return me_; }

  // Sum over the team, in rank order, scaled, into every member's tensor.
  void allreduce(const Call& call, const Operand& mine, double scale, Clock::time_point deadline);
  // The same in two halves, for a leg between hosts in the middle: after reduce_scatter, member i < slices
  // holds the team's sum of slice i in its own tensor; all_gather copies every slice from its owner to all.
  void reduce_scatter(const Call& call, const Operand& mine, std::size_t slices,
                      Clock::time_point deadline);
  void all_gather(std::size_t slices, Clock::time_point deadline);

  // Ends every wait of this rank and of the others on this host: `rank` is why. Any thread.
  void abort(int rank);

 private:
  struct Slot;
  struct Header;
  struct Plan;

  void announce(std::int32_t segment);
  char* map_peer(std::size_t peer, std::int32_t segment, std::uint64_t offset);
  void begin(const Call& call, const Operand& mine, Clock::time_point deadline);
  void post();
  Plan plan(std::size_t slices) const;
  void direct(double scale);
  void pipeline(std::size_t slices, bool reduce, bool gather, double scale);
  void copy_in(const Plan& plan, std::size_t k);
  void reduce_piece(const Plan& plan, std::size_t k, bool reduce, bool gather, double scale);
  void copy_out(const Plan& plan, std::size_t k);

  enum class Counter { in, reduced, out };
  void wait_all(Counter counter, std::uint32_t target);
  void raise(Counter counter, std::uint32_t to);
  Flag& flag(std::size_t member, Counter counter);
  void look_around();
  [[noreturn]] void fail_deadline(std::size_t late, Counter counter);

  char* stage(std::size_t member, std::uint32_t step) const;
  char* result(std::uint32_t step) const;

  Segment control_;
  Header* header_;
  Slot* slots_;
  std::vector<Member> members_;
  std::size_t me_;
  Patience patience_;

  // State of the operation that runs; only its thread touches it.
  std::uint32_t step_ = 0;  // first step of the next pass
  Call call_{};
  Operand mine_;
  std::vector<char*> tensors_;        // per member: where its tensor is mapped here, nullptr if staged
  bool any_staged_ = false;

  std::vector<std::int32_t> announced_;                                     // own segments the peers have
  std::vector<std::vector<std::unique_ptr<Segment>>> peer_segments_;        // [member][segment]
};

}  // namespace ff::hfreduce
