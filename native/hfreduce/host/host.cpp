#include "hfreduce/host/host.hpp"

#include <algorithm>
#include <cstring>

namespace ff::hfreduce {
namespace {

constexpr std::size_t kDirectBytes = 32u << 10;  // maximum for DirectPass, in which every rank reduces the whole tensor
constexpr std::size_t kPartBytes = 128u << 10;   // bytes of a part that a member claims at a time

// For small tensors and fewer cores than ranks: the last rank to arrive reduces for all, the other ranks sleep once.
void allreduce_solo(Team& team, const Request& request, double scale) {
  const Call& call = request.call;
  const Piece& tensor = request.in[0];
  const Place place = place_of(request.in);
  Posted mine{};
  mine.in = mine.out = place;
  if (!place.zero_copy()) std::memcpy(team.stage(team.me(), 0), tensor.data, tensor.bytes);
  team.solo(mine, [&] {
    std::array<const void*, kMembers> sources;
    std::array<void*, kMembers + 1> targets;
    std::size_t targeted = 0;
    bool staged = false;
    for (std::size_t r = 0; r < team.size(); ++r) {
      const Place theirs = team.posted(r).in;
      if (theirs.zero_copy()) {
        char* mapped = team.map(r, theirs);
        sources[r] = mapped;
        targets[targeted++] = mapped;
      } else {
        sources[r] = team.stage(r, 0);
        staged = true;
      }
    }
    if (staged) targets[targeted++] = team.result(0);
    simd::reduce_kernel(call.dtype, call.op)(targets.data(), targeted, sources.data(), team.size(), call.count, scale);
  });
  if (!place.zero_copy()) std::memcpy(tensor.data, team.result(0), tensor.bytes);
  team.finish_solo();
}

// For small tensors and a core per rank: one exchange of flags; every rank reads all inputs and computes the result.
class DirectPass final : public Pass {
 public:
  DirectPass(Team& team, const Request& request, double scale) : team_(team), request_(request), scale_(scale) {
    leaves_early = true;
  }
  void settle() override {}
  void publish(std::uint32_t) override {
    std::memcpy(team_.stage(team_.me(), 0), request_.in[0].data, request_.in[0].bytes);
  }
  void consume(std::uint32_t) override {
    std::array<const void*, kMembers> sources;
    for (std::size_t r = 0; r < team_.size(); ++r) sources[r] = team_.stage(r, 0);
    void* target = request_.out[0].data;
    simd::reduce_kernel(request_.call.dtype, request_.call.op)(&target, 1, sources.data(), team_.size(),
                                                               request_.call.count, scale_);
  }

 private:
  Team& team_;
  const Request& request_;
  double scale_;
};

void run_pass(Team& team, Pass& pass, const Posted& mine) {
  pass.publish(0);
  team.enter(mine);
  pass.settle();
  team.drive(pass, 1);
}

// For tensors that all members can read and write in place: awake members claim parts of slices.
void reduce_by_claims(Team& team, ReducePass& pass, std::size_t width) {
  std::size_t longest = 0;
  for (std::size_t c = 0; c < team.size(); ++c) longest = std::max(longest, pass.count(c));
  const std::size_t parts = std::clamp<std::size_t>(longest * width / kPartBytes, 1, 8);
  const std::size_t line = 64 / width;
  const std::size_t each = (longest + parts * line - 1) / (parts * line) * line;
  std::size_t owner, part, done = 0;
  while (team.claim(parts, owner, part)) {
    const std::size_t begin = std::min(part * each, pass.count(owner));
    pass.reduce_in_place(owner, {begin, std::min(each, pass.count(owner) - begin)});
    ++done;
  }
  if (done != 0) team.completed(done, parts * team.size());
  team.wait_completed();
}

ReducePass::Job slices_of(const Request& request, std::size_t owners, double scale) {
  const Call& call = request.call;
  ReducePass::Job job{};
  job.dtype = call.dtype;
  job.out_width = size_of(call.dtype);
  job.kernel = simd::reduce_kernel(call.dtype, call.op);
  job.scale = scale;
  for (std::size_t c = 0; c < owners; ++c) {
    const std::size_t begin = slice_begin(call.count, call.dtype, c, owners);
    job.counts.push_back(slice_begin(call.count, call.dtype, c + 1, owners) - begin);
    job.in.push_back(request.in[0].data + begin * job.out_width);
    if (!request.out.empty()) job.out.push_back(request.out[0].data + begin * job.out_width);
  }
  return job;
}

void allreduce(Team& team, const Request& request, double scale) {
  const std::size_t bytes = request.in[0].bytes;
  if (!team.spins() && bytes <= kChunkBytes) return allreduce_solo(team, request, scale);
  if (team.spins() && bytes <= kDirectBytes) {
    DirectPass pass(team, request, scale);
    return run_pass(team, pass, Posted{});
  }
  Posted mine{};
  mine.in = mine.out = place_of(request.in);
  ReducePass pass(team, slices_of(request, team.size(), scale), mine.in, mine.out);
  pass.publish(0);
  team.enter(mine);
  pass.settle();
  if (pass.everybody_zero_copy()) {
    reduce_by_claims(team, pass, size_of(request.call.dtype));
  } else {
    team.drive(pass, 1);
  }
}

// Reduces to one block per host, in the memory of the first member.
void allreduce_shared(Team& team, Operation& operation, double scale) {
  const Request& request = operation.request;
  ReducePass::Job job = slices_of(request, team.size(), scale);
  job.to = ReducePass::To::one;
  job.one = 0;
  std::shared_ptr<SharedResult> own;
  Posted mine{};
  mine.in = place_of(request.in);
  if (team.me() == 0) {
    own = SharedResult::allocate(request.in[0].bytes, team.size());
    mine.out = own->place();
    for (const char* part : job.in) job.out.push_back(own->data() + (part - request.in[0].data));
  }
  ReducePass pass(team, std::move(job), mine.in, mine.out);
  pass.publish(0);
  team.enter(mine);
  operation.shared = shared_of(team, std::move(own), request.in[0].bytes);
  pass.settle();
  team.drive(pass, 1);
}

void reduce(Team& team, const Request& request, double scale) {
  Posted mine{};
  mine.in = place_of(request.in);
  mine.out = place_of(request.out);
  ReducePass::Job job = slices_of(request, team.size(), scale);
  job.to = ReducePass::To::one;
  job.one = static_cast<std::size_t>(request.call.root);
  ReducePass pass(team, std::move(job), mine.in, mine.out);
  run_pass(team, pass, mine);
}

void reduce_scatter(Team& team, const Request& request, double scale) {
  const Call& call = request.call;
  ReducePass::Job job{};
  job.dtype = call.dtype;
  job.out_width = size_of(call.dtype);
  job.kernel = simd::reduce_kernel(call.dtype, call.op);
  job.scale = scale;
  job.counts.assign(team.size(), call.count);
  for (const Piece& piece : request.in) job.in.push_back(piece.data);
  job.out.assign(team.size(), nullptr);
  job.out[team.me()] = request.out[0].data;
  job.to = ReducePass::To::owner;
  Posted mine{};
  mine.in = place_of(request.in);
  ReducePass pass(team, std::move(job), mine.in, Place{});
  run_pass(team, pass, mine);
}

// Runs a copying collective: sets the pieces that each member gives and takes.
void copy(Team& team, const Request& request) {
  const Kind kind = request.call.kind;
  const auto root = static_cast<std::size_t>(request.call.root);
  const bool at_root = root == team.me();
  CopyPass::Job job{};
  job.split = kind == Kind::all_to_all || kind == Kind::scatter;
  job.in.resize(team.size());
  job.out.resize(team.size());
  if (kind == Kind::all_gather) job.in.assign(team.size(), request.in[0]);
  if (kind == Kind::all_to_all || (kind == Kind::scatter && at_root)) job.in = request.in;
  if (kind == Kind::all_gather || kind == Kind::all_to_all || (kind == Kind::gather && at_root)) job.out = request.out;
  if (kind == Kind::gather) job.in[root] = request.in[0];
  if (kind == Kind::broadcast && at_root) {
    job.in.assign(team.size(), request.in[0]);
    job.in[root] = {};
  }
  if (kind == Kind::scatter || (kind == Kind::broadcast && !at_root)) job.out[root] = request.out[0];
  CopyPass pass(team, std::move(job));
  run_pass(team, pass, pass.posted());
}

}  // namespace

double scale_of(const Call& call, std::size_t world) {
  return call.op == Op::avg ? 1.0 / static_cast<double>(world) : 1.0;
}

std::shared_ptr<SharedResult> shared_of(Team& team, std::shared_ptr<SharedResult> own, std::size_t bytes) {
  if (team.me() == 0) return own;
  const Place place = team.posted(0).out;
  return SharedResult::attach(place, bytes, team.segment(0, place.segment));
}

void run_on_host(Team& team, Operation& operation, Deadline deadline) {
  const Request& request = operation.request;
  const double scale = scale_of(request.call, team.size());
  team.begin(request.call, deadline);
  switch (request.call.kind) {
    case Kind::allreduce:
      if (request.call.shared != 0) return allreduce_shared(team, operation, scale);
      return allreduce(team, request, scale);
    case Kind::reduce: return reduce(team, request, scale);
    case Kind::reduce_scatter: return reduce_scatter(team, request, scale);
    case Kind::barrier: team.solo(Posted{}, [] {}); return team.finish_solo();
    default: return copy(team, request);
  }
}

// Copies each input piece to the output piece of the same index, if both exist.
void run_alone(Operation& operation) {
  const Request& request = operation.request;
  if (request.call.shared != 0) {
    operation.shared = SharedResult::allocate(request.in[0].bytes, 1);
    std::memcpy(operation.shared->data(), request.in[0].data, request.in[0].bytes);
  }
  for (std::size_t i = 0; i < std::min(request.in.size(), request.out.size()); ++i) {
    const Piece &from = request.in[i], &to = request.out[i];
    if (from.data != to.data) std::memmove(to.data, from.data, std::min(from.bytes, to.bytes));
  }
}

}  // namespace ff::hfreduce
