// Collectives among the ranks of one host, over shared memory. The group has no other host.
#pragma once

#include "hfreduce/operation.hpp"
#include "hfreduce/passes.hpp"

namespace ff::hfreduce {

// What averaging multiplies the sum with.
double scale_of(const Call& call, std::size_t world);

// Runs the request in the calling thread. Member i of the team is rank i of the group.
void run_on_host(Team& team, const Request& request, Clock::time_point deadline);

// The same for a group of one rank.
void run_alone(const Request& request);

}  // namespace ff::hfreduce
