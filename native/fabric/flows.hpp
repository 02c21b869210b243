// Flows over links with max-min fair rates, and the time at which each flow ends.
//
// Thread contract: one thread at a time. No I/O, no clock: time is a number of seconds from the start.
//
// Invariants, whenever a public method returns:
//   1. The rates of the flows that have not ended are max-min fair: each flow uses a full link (its bottleneck) on
//      which no other flow is faster. The sum of the rates on a link exceeds the link's capacity by rounding errors at
//      most.
//   2. A flow that ended has rate 0; a flow whose links have capacity 0 has rate 0 and never ends.
//
// After a flow ends, only the rates of a set of flows are computed again. The set starts with the flows whose
// bottleneck is a link of the ended flow. All other flows keep their rates. Then each link that the ended flow or the
// set uses is checked. A flow of such a link joins the set in two cases: the flow no longer has a bottleneck, or the
// link is the bottleneck of a slower flow of the set. If no flow joins, the rates are max-min fair, and such rates are
// unique. If flows still join after a fixed number of rounds, all flows of the checked links are added.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace ff::fabric {

class Flows {
 public:
  // Flow i uses links[begin[i]] to links[begin[i + 1] - 1], each at most once, and carries bytes[i]. Capacities are
  // bytes a second. Throws Code::invalid if an index is out of range, a number is negative or not finite, or a flow
  // uses no link.
  Flows(std::span<const double> capacities, std::span<const std::int64_t> begin, std::span<const std::int32_t> links,
        std::span<const double> bytes);

  // Runs until the time `until`, or until no flow can end. If a flow ends at time t, all flows that end by
  // t * (1 + merge) end in the same event, each at the time that its present rate gives. So `merge` bounds the relative
  // error that one event adds to end times; errors of several events can add up.
  void run(double until, double merge);

  double now() const { return now_; }
  // Number of times that rates were computed, counting each round.
  std::size_t events() const { return events_; }
  const std::vector<double>& rates() const { return rate_; }
  // Time at which each flow ended; infinity if it has not.
  const std::vector<double>& ends() const { return end_; }
  // Bytes that each flow still has to carry.
  std::vector<double> left() const;

 private:
  struct Share {
    double share;
    std::int32_t link;
  };

  void solve_after(std::span<const std::int32_t> ended);
  void add(std::int32_t flow);
  void see(std::int32_t link);
  void fill();
  void settle(std::int32_t flow, double rate, std::int32_t link);
  bool join();
  void reschedule();
  double next_end();
  void take_ended(double horizon, std::vector<std::int32_t>& ended);
  void end_at(std::int32_t flow, double at);

  std::span<const std::int32_t> links_of(std::int32_t flow) const {
    return {links_.data() + begin_[flow], links_.data() + begin_[flow + 1]};
  }

  std::vector<double> capacity_;
  std::vector<std::int64_t> begin_;  // flow -> links
  std::vector<std::int32_t> links_;
  std::vector<std::int64_t> users_begin_, users_end_;  // link -> flows; see() drops the link's ended flows
  std::vector<std::int32_t> users_;

  std::vector<double> rate_, remaining_, since_, end_;  // of each flow; remaining_: bytes left at the time since_
  std::vector<std::int32_t> held_;                      // bottleneck link of each flow; -1 before the first rate
  std::vector<char> live_;
  // End time of each flow at its present rate, and the first end time of each block of flows.
  std::vector<double> due_, block_due_;
  std::vector<char> block_changed_;

  // The set of flows whose rates are computed again, the links that these flows and the ended flows use, and marks for
  // the members of both.
  std::vector<std::int32_t> set_, seen_;
  std::vector<char> in_set_, is_seen_;
  std::vector<double> before_;           // rate of a flow of the set before the event
  std::vector<double> free_;             // capacity of a link that its settled flows leave free
  std::vector<std::int32_t> unsettled_;  // number of a link's flows without a new rate
  std::vector<char> waits_;              // 1 for a flow without a new rate
  std::vector<Share> shares_;
  double now_ = 0.0;
  std::size_t events_ = 0;
};

}  // namespace ff::fabric
