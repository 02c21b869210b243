#include "hfreduce/host/passes.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace ff::hfreduce {

ReducePass::ReducePass(Team& team, Job job, Place in, Place out)
    : team_(team), job_(std::move(job)), in_(in), out_(out), width_(size_of(job_.dtype)) {
  const std::size_t owners = job_.counts.size();
  const std::size_t widest = std::max(width_, job_.to == To::owner ? 1 : job_.out_width);
  piece_ = kChunkBytes / owners / 64 * 64 / widest;
  std::size_t before = 0, longest = 0;
  for (const std::size_t count : job_.counts) {
    begins_.push_back(before);
    before += count;
    longest = std::max(longest, count);
  }
  steps = job_.grid.empty() ? static_cast<std::uint32_t>(std::max<std::size_t>(1, (longest + piece_ - 1) / piece_))
                            : static_cast<std::uint32_t>(job_.grid[0].size());
  leaves_early = !in_.zero_copy() && job_.to == To::owner;
}

bool ReducePass::wants(std::size_t member) const {
  return job_.to == To::all || (job_.to == To::one && member == job_.one);
}

void ReducePass::settle() {
  uses_result = false;
  bool any_staged = false;
  for (std::size_t r = 0; r < team_.size(); ++r) {
    const Posted& theirs = team_.posted(r);
    in_of_[r] = theirs.in.zero_copy() ? team_.map(r, theirs.in) : nullptr;
    out_of_[r] = wants(r) && theirs.out.zero_copy() ? team_.map(r, theirs.out) : nullptr;
    any_staged = any_staged || in_of_[r] == nullptr;
    uses_result = uses_result || (wants(r) && out_of_[r] == nullptr);
  }
  // Without staging no copy can overlap with work, so one step moves whole slices.
  if (!any_staged && !uses_result && job_.grid.empty()) {
    piece_ = std::max<std::size_t>(1, *std::max_element(job_.counts.begin(), job_.counts.end()));
    steps = 1;
  }
}

bool ReducePass::everybody_zero_copy() const {
  for (std::size_t r = 0; r < team_.size(); ++r) {
    if (in_of_[r] == nullptr) return false;
  }
  return !uses_result;
}

Range ReducePass::range(std::size_t owner, std::uint32_t step) const {
  if (!job_.grid.empty()) return job_.grid[owner][step];
  const std::size_t begin = std::min(step * piece_, job_.counts[owner]);
  return {begin, std::min(piece_, job_.counts[owner] - begin)};
}

// Copies the step's piece of every slice, except this rank's own slice, into the staging slot, side by side.
void ReducePass::publish(std::uint32_t step) {
  if (in_.zero_copy()) return;
  char* slot = team_.stage(team_.me(), step);
  for (std::size_t c = 0; c < job_.counts.size(); ++c) {
    if (c == team_.me()) continue;
    const Range piece = range(c, step);
    std::memcpy(slot + c * piece_ * width_, job_.in[c] + piece.begin * width_, piece.count * width_);
  }
}

void ReducePass::consume(std::uint32_t step) {
  const std::size_t me = team_.me();
  if (me >= job_.counts.size()) return;
  const Range piece = range(me, step);
  if (piece.count != 0) {
    const std::size_t from = piece.begin * width_, to = piece.begin * job_.out_width;
    std::array<const void*, kMembers> sources;
    std::array<void*, kMembers + 1> targets;
    std::size_t targeted = 0;
    for (std::size_t r = 0; r < team_.size(); ++r) {
      if (in_of_[r] != nullptr) {
        sources[r] = in_of_[r] + begins_[me] * width_ + from;
      } else {
        sources[r] = r == me ? job_.in[me] + from : team_.stage(r, step) + me * piece_ * width_;
      }
      if (r == me ? !job_.out.empty() : out_of_[r] != nullptr) {
        targets[targeted++] = (r == me ? job_.out[me] : out_of_[r] + begins_[me] * job_.out_width) + to;
      }
    }
    if (uses_result) targets[targeted++] = team_.result(step) + me * piece_ * job_.out_width;
    job_.kernel(targets.data(), targeted, sources.data(), team_.size(), piece.count, job_.scale);
  }
  if (job_.consumed) job_.consumed(step);
}

void ReducePass::reduce_in_place(std::size_t owner, Range piece) {
  std::array<const void*, kMembers> sources;
  std::array<void*, kMembers> targets;
  std::size_t targeted = 0;
  for (std::size_t r = 0; r < team_.size(); ++r) {
    sources[r] = in_of_[r] + (begins_[owner] + piece.begin) * width_;
    if (out_of_[r] != nullptr) {
      targets[targeted++] = out_of_[r] + (begins_[owner] + piece.begin) * job_.out_width;
    }
  }
  job_.kernel(targets.data(), targeted, sources.data(), team_.size(), piece.count, job_.scale);
}

void ReducePass::collect(std::uint32_t step) {
  if (!uses_result || !wants(team_.me()) || out_.zero_copy()) return;
  const char* slot = team_.result(step);
  for (std::size_t c = 0; c < job_.counts.size(); ++c) {
    if (c == team_.me()) continue;
    const Range piece = range(c, step);
    std::memcpy(job_.out[c] + piece.begin * job_.out_width, slot + c * piece_ * job_.out_width,
                piece.count * job_.out_width);
  }
}

CopyPass::CopyPass(Team& team, Job job) : team_(team), job_(std::move(job)) {
  for (const Piece& part : job_.in) {
    if (part.bytes != 0) common_ = part;
  }
  in_ = place_of(job_.split ? job_.in : Pieces{common_});
  piece_ = job_.split ? kChunkBytes / team_.size() / 64 * 64 : kChunkBytes;
  leaves_early = !in_.zero_copy();
}

Posted CopyPass::posted() const {
  Posted mine{};
  mine.in = in_;
  mine.copies = true;
  for (std::size_t m = 0; m < team_.size(); ++m) {
    mine.gives[m] = job_.in[m].bytes;
    mine.takes[m] = job_.out[m].bytes;
  }
  return mine;
}

void CopyPass::compare_lengths() const {
  for (std::size_t reader = 0; reader < team_.size(); ++reader) {
    const Posted& wanted = team_.posted(reader);
    for (std::size_t giver = 0; giver < team_.size(); ++giver) {
      const std::uint64_t gives = team_.posted(giver).gives[reader];
      if (gives == wanted.takes[giver]) continue;
      throw lengths_disagree(team_.call(), team_.rank(giver), gives, team_.rank(reader), wanted.takes[giver]);
    }
  }
}

void CopyPass::settle() {
  compare_lengths();
  const std::size_t me = team_.me();
  std::uint64_t most = 0;
  bool any_staged = false;
  for (std::size_t r = 0; r < team_.size(); ++r) {
    const Posted& theirs = team_.posted(r);
    const std::uint64_t longest = *std::max_element(theirs.gives, theirs.gives + team_.size());
    in_of_[r] = nullptr;
    most = std::max(most, longest);
    if (longest == 0) continue;
    if (!theirs.in.zero_copy()) {
      any_staged = true;
    } else if (r != me && job_.out[r].bytes != 0) {
      const std::uint64_t before = std::accumulate(theirs.gives, theirs.gives + me, std::uint64_t{0});
      in_of_[r] = team_.map(r, theirs.in) + (job_.split ? before : 0);
    }
  }
  if (!any_staged) piece_ = std::max<std::size_t>(1, most);
  steps = static_cast<std::uint32_t>(std::max<std::size_t>(1, (most + piece_ - 1) / piece_));
}

void CopyPass::publish(std::uint32_t step) {
  if (in_.zero_copy()) return;
  char* slot = team_.stage(team_.me(), step);
  const auto put = [&](const Piece& part, char* to) {
    const std::size_t begin = std::min(step * piece_, part.bytes), n = std::min(piece_, part.bytes - begin);
    if (n != 0) std::memcpy(to, part.data + begin, n);
  };
  if (!job_.split) return put(common_, slot);
  for (std::size_t c = 0; c < job_.in.size(); ++c) {
    if (c != team_.me()) put(job_.in[c], slot + c * piece_);
  }
}

void CopyPass::consume(std::uint32_t step) {
  const std::size_t me = team_.me();
  for (std::size_t r = 0; r < team_.size(); ++r) {
    const Piece& target = job_.out[r];
    const std::size_t begin = std::min(step * piece_, target.bytes);
    const std::size_t n = std::min(piece_, target.bytes - begin);
    if (n == 0) continue;
    const char* source;
    if (r == me) {
      source = job_.in[me].data + begin;
    } else if (in_of_[r] != nullptr) {
      source = in_of_[r] + begin;
    } else {
      source = team_.stage(r, step) + (job_.split ? me * piece_ : 0);
    }
    if (source != target.data + begin) std::memmove(target.data + begin, source, n);
  }
}

GatherPass::GatherPass(Team& team, Job job) : team_(team), job_(std::move(job)) {
  steps = static_cast<std::uint32_t>(job_.grid[0].size());
  leaves_early = !owner() || !job_.in_tensor || !job_.place.zero_copy();
}

void GatherPass::settle() {
  for (std::size_t c = 0; c < job_.grid.size(); ++c) {
    const Place place = team_.posted(c).in;
    const bool mapped = job_.in_tensor && place.zero_copy();
    slice_of_[c] = mapped ? team_.map(c, place) + job_.begins[c] * job_.width : nullptr;
  }
}

bool GatherPass::ready(std::uint32_t step) { return !owner() || job_.final(step); }

void GatherPass::publish(std::uint32_t step) {
  if (!owner() || (job_.in_tensor && job_.place.zero_copy())) return;
  const Range piece = job_.grid[team_.me()][step];
  std::memcpy(team_.stage(team_.me(), step), job_.own + piece.begin * job_.width, piece.count * job_.width);
}

void GatherPass::consume(std::uint32_t step) {
  if (job_.out == nullptr) return;
  for (std::size_t c = 0; c < job_.grid.size(); ++c) {
    const Range piece = job_.grid[c][step];
    char* target = job_.out + (job_.begins[c] + piece.begin) * job_.width;
    const char* source = c == team_.me()           ? job_.own + piece.begin * job_.width
                         : slice_of_[c] != nullptr ? slice_of_[c] + piece.begin * job_.width
                                                   : team_.stage(c, step);
    if (source != target) std::memcpy(target, source, piece.count * job_.width);
  }
}

}  // namespace ff::hfreduce
