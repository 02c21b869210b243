// Collectives among the ranks of one host, over shared memory. The group has no other host.
#pragma once

#include "hfreduce/engine/operation.hpp"
#include "hfreduce/host/passes.hpp"

namespace ff::hfreduce {

// Returns the block of a shared result, which belongs to the team's first member. `own`: the block on that member, null
// on the other members. REQUIRES: all members have posted; the first one has posted the block's place as `out`.
std::shared_ptr<SharedResult> shared_of(Team& team, std::shared_ptr<SharedResult> own, std::size_t bytes);

// Returns the factor by which averaging multiplies the sum.
double scale_of(const Call& call, std::size_t world);

// Runs the request in the calling thread. Member i of the team is rank i of the group.
void run_on_host(Team& team, Operation& operation, Deadline deadline);

// Runs the request for a group of one rank.
void run_alone(Operation& operation);

}  // namespace ff::hfreduce
