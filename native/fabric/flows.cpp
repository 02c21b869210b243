#include "fabric/flows.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "base/error.hpp"

namespace ff::fabric {

namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
// End times whose relative difference is smaller than this are one event, because rounding cannot tell them apart.
constexpr double kLeastMerge = 1e-12;
// Rates whose relative difference is smaller than this count as equal, so that rounding errors change no flow.
constexpr double kSame = 1e-11;
constexpr int kMostRounds = 4;
constexpr std::size_t kBlock = 64;  // number of flows in a block; block_due_ holds each block's first end time

bool is_quantity(double value) { return std::isfinite(value) && value >= 0.0; }

void check(bool holds, const char* message) {
  if (!holds) throw Error(Code::invalid, message);
}

}  // namespace

Flows::Flows(std::span<const double> capacities, std::span<const std::int64_t> begin,
             std::span<const std::int32_t> links, std::span<const double> bytes)
    : capacity_(capacities.begin(), capacities.end()),
      begin_(begin.begin(), begin.end()),
      links_(links.begin(), links.end()),
      remaining_(bytes.begin(), bytes.end()) {
  const std::size_t flows = bytes.size(), count = capacities.size();
  check(begin_.size() == flows + 1 && begin_.front() == 0 && begin_.back() == static_cast<std::int64_t>(links_.size()),
        "the paths do not match the flows");
  check(std::all_of(capacity_.begin(), capacity_.end(), is_quantity), "a capacity is negative or not finite");
  check(std::all_of(remaining_.begin(), remaining_.end(), is_quantity), "a size is negative or not finite");
  for (std::size_t flow = 0; flow < flows; ++flow)
    check(begin_[flow] < begin_[flow + 1], "a flow uses no link; its rate has no bound");
  users_begin_.assign(count + 1, 0);
  for (const std::int32_t link : links_) {
    check(link >= 0 && static_cast<std::size_t>(link) < count, "a path names a link that does not exist");
    ++users_begin_[link + 1];
  }
  for (std::size_t link = 0; link < count; ++link) users_begin_[link + 1] += users_begin_[link];
  users_end_.assign(users_begin_.begin(), users_begin_.end() - 1);
  users_.resize(links_.size());
  for (std::int32_t flow = 0; flow < static_cast<std::int32_t>(flows); ++flow)
    for (const std::int32_t link : links_of(flow)) {
      check(users_end_[link] == users_begin_[link] || users_[users_end_[link] - 1] != flow, "a flow uses a link twice");
      users_[users_end_[link]++] = flow;
    }

  rate_.assign(flows, 0.0);
  since_.assign(flows, 0.0);
  end_.assign(flows, kNever);
  before_.assign(flows, 0.0);
  held_.assign(flows, -1);
  live_.assign(flows, 1);
  due_.assign(flows, kNever);
  block_due_.assign((flows + kBlock - 1) / kBlock, kNever);
  block_changed_.assign(block_due_.size(), 0);
  in_set_.assign(flows, 0);
  waits_.assign(flows, 0);
  is_seen_.assign(count, 0);
  free_.assign(count, 0.0);
  unsettled_.assign(count, 0);
  for (std::int32_t flow = 0; flow < static_cast<std::int32_t>(flows); ++flow) add(flow);
  fill();
  reschedule();
}

std::vector<double> Flows::left() const {
  std::vector<double> left(remaining_);
  for (std::size_t flow = 0; flow < left.size(); ++flow)
    left[flow] = live_[flow] != 0 ? std::max(0.0, left[flow] - rate_[flow] * (now_ - since_[flow])) : 0.0;
  return left;
}

void Flows::run(double until, double merge) {
  std::vector<std::int32_t> ended;
  for (double at = next_end(); at != kNever && at <= until; at = next_end()) {
    ended.clear();
    take_ended(std::min(until, at * (1.0 + std::max(merge, kLeastMerge))), ended);
    solve_after(ended);
    reschedule();
  }
  if (std::isfinite(until)) now_ = std::max(now_, until);
}

void Flows::end_at(std::int32_t flow, double at) {
  due_[flow] = at;
  block_changed_[static_cast<std::size_t>(flow) / kBlock] = 1;
}

// Returns the time at which the next flow ends; infinity if no flow can end.
double Flows::next_end() {
  double first = kNever;
  for (std::size_t block = 0; block < block_due_.size(); ++block) {
    if (block_changed_[block] != 0) {
      block_changed_[block] = 0;
      const auto begin = due_.begin() + static_cast<std::ptrdiff_t>(block * kBlock);
      block_due_[block] =
          *std::min_element(begin, begin + static_cast<std::ptrdiff_t>(std::min(kBlock, due_.size() - block * kBlock)));
    }
    first = std::min(first, block_due_[block]);
  }
  return first;
}

// Ends all flows whose end time is not after `horizon`, and sets the clock to the last of these times.
void Flows::take_ended(double horizon, std::vector<std::int32_t>& ended) {
  for (std::size_t block = 0; block < block_due_.size(); ++block) {
    if (block_due_[block] > horizon) continue;
    for (std::size_t flow = block * kBlock; flow < std::min(due_.size(), (block + 1) * kBlock); ++flow) {
      if (due_[flow] > horizon) continue;
      now_ = std::max(now_, due_[flow]);
      end_[flow] = due_[flow];
      live_[flow] = 0;
      remaining_[flow] = 0.0;
      end_at(static_cast<std::int32_t>(flow), kNever);
      ended.push_back(static_cast<std::int32_t>(flow));
    }
  }
}

void Flows::add(std::int32_t flow) {
  if (in_set_[flow] != 0) return;
  in_set_[flow] = 1;
  before_[flow] = rate_[flow];
  set_.push_back(flow);
  for (const std::int32_t link : links_of(flow)) see(link);
}

void Flows::see(std::int32_t link) {
  if (is_seen_[link] != 0) return;
  is_seen_[link] = 1;
  seen_.push_back(link);
  for (std::int64_t at = users_begin_[link]; at < users_end_[link];)
    if (live_[users_[at]] != 0) ++at;
    else users_[at] = users_[--users_end_[link]];
}

void Flows::solve_after(std::span<const std::int32_t> ended) {
  for (const std::int32_t flow : set_) in_set_[flow] = 0;
  for (const std::int32_t link : seen_) is_seen_[link] = 0;
  set_.clear();
  seen_.clear();
  for (const std::int32_t flow : ended) {
    rate_[flow] = 0.0;
    for (const std::int32_t link : links_of(flow)) see(link);
  }
  for (std::size_t next = 0, links = seen_.size(); next < links; ++next) {
    const std::int32_t link = seen_[next];
    for (std::int64_t at = users_begin_[link]; at < users_end_[link]; ++at)
      if (held_[users_[at]] == link) add(users_[at]);
  }
  fill();
  for (int round = 1; join(); ++round) {
    if (round == kMostRounds)
      for (std::size_t next = 0; next < seen_.size(); ++next)
        for (std::int64_t at = users_begin_[seen_[next]]; at < users_end_[seen_[next]]; ++at) add(users_[at]);
    fill();
  }
}

// Computes new rates for the flows of the set by progressive filling of the seen links. Other flows keep their rate.
void Flows::fill() {
  const auto larger = [](const Share& a, const Share& b) { return a.share > b.share; };
  ++events_;
  for (const std::int32_t flow : set_) waits_[flow] = 1;
  shares_.clear();
  for (const std::int32_t link : seen_) {
    double used = 0.0;
    std::int32_t count = 0;
    for (std::int64_t at = users_begin_[link]; at < users_end_[link]; ++at) {
      const std::int32_t flow = users_[at];
      if (waits_[flow] != 0) ++count;
      else used += rate_[flow];
    }
    unsettled_[link] = count;
    free_[link] = std::max(0.0, capacity_[link] - used);
    if (count > 0) shares_.push_back({free_[link] / count, link});
  }
  std::make_heap(shares_.begin(), shares_.end(), larger);
  double level = 0.0;
  for (std::size_t waiting = set_.size(); waiting > 0;) {
    std::pop_heap(shares_.begin(), shares_.end(), larger);
    const Share top = shares_.back();
    shares_.pop_back();
    if (unsettled_[top.link] == 0) continue;
    const double share = free_[top.link] / unsettled_[top.link];
    if (share > top.share) {  // flows of the link have been settled meanwhile, so its share has grown
      shares_.push_back({share, top.link});
      std::push_heap(shares_.begin(), shares_.end(), larger);
      continue;
    }
    level = std::max(level, share);  // shares never fall, except by rounding errors
    for (std::int64_t at = users_begin_[top.link]; at < users_end_[top.link]; ++at)
      if (waits_[users_[at]] != 0) {
        settle(users_[at], level, top.link);
        --waiting;
      }
  }
}

void Flows::settle(std::int32_t flow, double rate, std::int32_t link) {
  waits_[flow] = 0;
  rate_[flow] = rate;
  held_[flow] = link;
  for (const std::int32_t used : links_of(flow)) {
    --unsettled_[used];
    free_[used] = std::max(0.0, free_[used] - rate);
  }
}

// Adds to the set the other flows whose rate is no longer max-min fair. Returns false if there are none.
bool Flows::join() {
  const std::size_t before = set_.size();
  for (std::size_t next = 0, links = seen_.size(); next < links; ++next) {
    const std::int32_t link = seen_[next];
    double used = 0.0, fastest = 0.0, slowest_held = kNever;
    for (std::int64_t at = users_begin_[link]; at < users_end_[link]; ++at) {
      const std::int32_t flow = users_[at];
      used += rate_[flow];
      fastest = std::max(fastest, rate_[flow]);
      if (in_set_[flow] != 0 && held_[flow] == link) slowest_held = std::min(slowest_held, rate_[flow]);
    }
    const bool full = used >= capacity_[link] * (1.0 - kSame);
    for (std::int64_t at = users_begin_[link]; at < users_end_[link]; ++at) {
      const std::int32_t flow = users_[at];
      if (in_set_[flow] != 0) continue;
      const bool freed = held_[flow] == link && (!full || rate_[flow] < fastest * (1.0 - kSame));
      if (freed || rate_[flow] > slowest_held * (1.0 + kSame)) add(flow);
    }
  }
  return set_.size() > before;
}

// Computes the end times of the flows whose rate changed.
void Flows::reschedule() {
  for (const std::int32_t flow : set_) {
    const double former = before_[flow];
    if (former == rate_[flow]) continue;
    remaining_[flow] = std::max(0.0, remaining_[flow] - former * (now_ - since_[flow]));
    since_[flow] = now_;
    end_at(flow, rate_[flow] > 0.0 ? now_ + remaining_[flow] / rate_[flow] : kNever);
  }
}

}  // namespace ff::fabric
