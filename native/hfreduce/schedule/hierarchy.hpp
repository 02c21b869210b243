// Collectives over several hosts: legs over shared memory inside each host, legs over the network between them.
//
//   allreduce       team: each lane gets the host's sum of its slice · network: lane adds the hosts' sums ·
//                   team: every member copies all slices
//   reduce          the same, but the last leg goes to the root only
//   broadcast       team of the root: every member copies · network: each lane carries its slice · other teams: copy
//   reduce_scatter  team: member i gets the host's sums for the i-th rank of every host · network: ring
//   all_gather      network: each piece is sent once to each host · team: every member copies
//   gather, scatter, all_to_all   network: rank to rank · team: member to member
//
// Thread contract: one thread runs operations; other threads may add the links of the transport.
#pragma once

#include <memory>
#include <vector>

#include "hfreduce/engine/operation.hpp"
#include "hfreduce/host/team.hpp"
#include "hfreduce/schedule/exchange.hpp"
#include "hfreduce/schedule/plan.hpp"
#include "hfreduce/transport/transport.hpp"

namespace ff::hfreduce {

class Hierarchy {
 public:
  // `team` is null for a rank alone on its host. Team and transport outlive this object.
  Hierarchy(Layout layout, Team* team, Transport& transport);

  // Returns the ranks that a call sends to; links to them must exist when it runs. Any thread.
  std::vector<int> peers(const Request& request);
  void run(Operation& operation, Deadline deadline);
  // Rank 0 decides which prioritised operation is next; the first rank of each host tells its team.
  std::uint64_t settle_next(std::uint64_t chosen, Deadline deadline);
  void set_rules(std::vector<Rule> rules) { planner_.set_rules(std::move(rules)); }

 private:
  struct Leg;  // one exchange in progress

  const Layout& layout() const { return planner_.layout(); }
  std::size_t world() const;
  bool has_lane(const Plan& plan) const { return layout().place < plan.lanes; }
  Handshake handshake(const Call& call) const;
  std::vector<int> lane_ranks() const;

  void allreduce(const Request& request);
  void allreduce_shared(Operation& operation);
  void reduce(const Request& request);
  void broadcast(const Request& request);
  void barrier(const Request& request);
  void reduce_scatter(const Request& request);
  void reduce_scatter_uneven(const Request& request);
  void all_gather(const Request& request);
  void direct_copies(const Request& request);

  void team_sum(const Request& request, const Plan& plan, Leg* leg, char* own, DType partial);
  void team_gather(const Request& request, const Plan& plan, Leg* leg, const char* own, char* out, bool in_tensor);
  void team_copy(const Request& request, Pieces in, bool split, Pieces out);
  void pump(Leg& leg);
  void wait(int late_rank);  // waits for the network; throws on timeout

  Planner planner_;
  Team* team_;
  Transport& transport_;
  Scratch scratch_;
  std::vector<char> partial_;  // partial sums that have no place in a tensor
  Deadline deadline_;
};

}  // namespace ff::hfreduce
