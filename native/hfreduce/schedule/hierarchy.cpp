#include "hfreduce/schedule/hierarchy.hpp"

#include <algorithm>
#include <cstring>

#include "base/process/interrupts.hpp"
#include "hfreduce/host/host.hpp"

namespace ff::hfreduce {
namespace {

using namespace std::chrono_literals;

Posted places(const Request& request) {
  Posted mine{};
  mine.in = place_of(request.in);
  mine.out = place_of(request.out);
  return mine;
}

// Returns whether partial sums of a 16-bit or 8-bit type stay unrounded. They are then float32, outside the tensor.
bool is_unrounded(const Call& call) {
  return call.wire == Codec::fp32 && call.dtype != DType::f32 && call.dtype != DType::f64 && is_floating(call.dtype);
}

bool is_coded(const Call& call) { return call.wire != Codec::none && call.wire != Codec::fp32; }

// Converts `count` elements with `kernel`. If `kernel` is null, copies `bytes` bytes unchanged.
void convert(simd::ReduceFn kernel, const void* from, void* to, std::size_t count, std::size_t bytes) {
  if (kernel != nullptr) {
    kernel(&to, 1, &from, 1, count, 1.0);
  } else if (bytes > 0) {
    std::memcpy(to, from, bytes);
  }
}

}  // namespace

struct Hierarchy::Leg {
  Leg(const Plan& its_plan, const std::vector<int>& ranks, Transport& transport, Scratch& scratch, const Data& data,
      const Handshake& handshake)
      : plan(its_plan),
        exchange(its_plan.program, ranks, transport, scratch, data, handshake),
        final(its_plan.program.chunks.size()) {}

  bool advance() {
    const bool moved = exchange.advance();
    while (const auto chunk = exchange.pop_final()) final[*chunk] = 1;
    return moved;
  }
  void provide(std::uint32_t step) {
    if (step < plan.input_chunks.size()) exchange.provide(plan.input_chunks[step]);
  }
  void provide_all() {
    for (std::uint32_t step = 0; step < plan.input_chunks.size(); ++step) provide(step);
  }
  bool is_final(std::uint32_t step) const {
    return step >= plan.final_chunks.size() || final[plan.final_chunks[step]] != 0;
  }

  const Plan& plan;
  Exchange exchange;
  std::vector<std::uint8_t> final;  // by chunk
};

Hierarchy::Hierarchy(Layout layout, Team* team, Transport& transport)
    : planner_(std::move(layout)), team_(team), transport_(transport) {}

std::size_t Hierarchy::world() const {
  std::size_t total = 0;
  for (const auto& ranks : layout().hosts) total += ranks.size();
  return total;
}

std::vector<int> Hierarchy::lane_ranks() const {
  std::vector<int> ranks;
  for (const auto& host : layout().hosts) {
    ranks.push_back(layout().place < host.size() ? host[layout().place] : -1);
  }
  return ranks;
}

Handshake Hierarchy::handshake(const Call& call) const {
  const int me = layout().hosts[layout().host][layout().place];
  const auto check = [&call, me](int rank, const void* theirs) {
    Call other;
    std::memcpy(static_cast<void*>(&other), theirs, sizeof other);
    if (other == call) return;
    throw Error(Code::collective, "ranks disagree: rank " + std::to_string(me) + " calls " + to_string(call) +
                                      ", rank " + std::to_string(rank) + " calls " + to_string(other));
  };
  return {&call, sizeof call, check};
}

void Hierarchy::wait(int late_rank) {
  if (deadline_.passed()) {
    throw Error(Code::late, "timed out: rank " + std::to_string(late_rank) + " did not take part within the timeout",
                late_rank);
  }
  interrupts::check(layout().hosts[layout().host][layout().place]);
  transport_.wait(20ms);
}

void Hierarchy::pump(Leg& leg) {
  while (!leg.exchange.finished()) {
    if (!leg.advance()) wait(leg.exchange.waiting_for());
  }
  leg.advance();
}

// Adds the inputs of the host's members: each member with a lane gets the sum of its slice at `own`. Each piece of the
// slice goes to the network as soon as it is summed.
void Hierarchy::team_sum(const Request& request, const Plan& plan, Leg* leg, char* own, DType partial) {
  const Call& call = request.call;
  const std::size_t width = size_of(call.dtype);
  if (team_ == nullptr) {
    if (partial != call.dtype) {
      void* to = own;
      const void* from = request.in[0].data;
      simd::widen_kernel(call.dtype)(&to, 1, &from, 1, call.count, 1.0);
    } else if (own != request.in[0].data) {
      std::memcpy(own, request.in[0].data, request.in[0].bytes);
    }
    leg->provide_all();
    return;
  }
  ReducePass::Job job{};
  job.dtype = call.dtype;
  job.out_width = size_of(partial);
  job.kernel = partial == call.dtype ? simd::reduce_kernel(call.dtype, call.op) : simd::widen_kernel(call.dtype);
  job.counts = plan.counts;
  job.grid = plan.inputs;
  job.to = ReducePass::To::owner;
  job.out.assign(plan.lanes, nullptr);
  for (const std::size_t begin : plan.begins) job.in.push_back(request.in[0].data + begin * width);
  if (leg != nullptr) {
    job.out[layout().place] = own;
    job.consumed = [leg](std::uint32_t step) {
      leg->provide(step);
      leg->advance();
    };
  }
  const Posted mine = places(request);
  ReducePass pass(*team_, std::move(job), mine.in, Place{});
  pass.publish(0);
  team_->enter(mine);
  pass.settle();
  team_->drive(pass, 1);
}

// Copies the slices of all lanes to `out` on every member where `out` is not null. `own`: start of this member's slice.
void Hierarchy::team_gather(const Request& request, const Plan& plan, Leg* leg, const char* own, char* out,
                            bool in_tensor) {
  if (team_ != nullptr) {
    GatherPass::Job job{};
    job.width = size_of(request.call.dtype);
    job.begins = plan.begins;
    job.grid = plan.finals;
    job.own = own;
    job.out = out;
    job.in_tensor = in_tensor;
    job.place = place_of(request.in);
    job.final = [leg](std::uint32_t step) {
      if (!leg->is_final(step)) leg->advance();
      return leg->is_final(step);
    };
    if (leg != nullptr) {
      job.busy = [leg] { return !leg->exchange.finished(); };
      job.idle = [this, leg] {
        if (!leg->advance()) {
          if (deadline_.passed()) wait(leg->exchange.waiting_for());
          interrupts::check(layout().hosts[layout().host][layout().place]);
          transport_.wait(1ms);
        }
      };
    }
    GatherPass pass(*team_, std::move(job));
    team_->again(pass);
  }
  if (leg != nullptr) pump(*leg);
}

void Hierarchy::allreduce(const Request& request) {
  const Call& call = request.call;
  const std::size_t width = size_of(call.dtype);
  const bool unrounded = is_unrounded(call);
  const auto plan = planner_.plan(call, unrounded ? sizeof(float) : width);
  const bool lane = has_lane(*plan);
  const std::size_t begin = lane ? plan->begins[layout().place] : 0;
  char* slice = request.in[0].data + begin * width;
  char* own = slice;
  if (unrounded && lane) {
    partial_.resize(std::max(partial_.size(), plan->counts[layout().place] * sizeof(float)));
    own = partial_.data();
  }
  const bool coded = is_coded(call);
  std::optional<Leg> leg;
  if (lane) {
    const Data data{own,
                    unrounded ? DType::f32 : call.dtype,
                    call.op,
                    scale_of(call, world()),
                    coded ? call.wire : Codec::none,
                    coded && request.residual != nullptr ? request.residual + begin : nullptr,
                    coded && request.seed != 0 ? request.seed + static_cast<std::uint64_t>(layout().host) : 0};
    leg.emplace(*plan, lane_ranks(), transport_, scratch_, data, handshake(call));
  }
  Leg* running = lane ? &*leg : nullptr;
  team_sum(request, *plan, running, own, unrounded ? DType::f32 : call.dtype);
  if (unrounded && lane) {
    pump(*running);
    const std::size_t count = plan->counts[layout().place];
    convert(simd::narrow_kernel(call.dtype), own, slice, count, count * width);
  }
  team_gather(request, *plan, running, slice, request.out[0].data, true);
}

// Runs an allreduce with a shared result. The lanes work in the shared block itself, so no gather is needed.
void Hierarchy::allreduce_shared(Operation& operation) {
  const Request& request = operation.request;
  const Call& call = request.call;
  const auto plan = planner_.plan(call, size_of(call.dtype));
  std::shared_ptr<SharedResult> own;
  Posted mine = places(request);
  if (layout().place == 0) {
    own = SharedResult::allocate(request.in[0].bytes, team_ == nullptr ? 1 : team_->size());
    mine.out = own->place();
  }
  if (team_ != nullptr) {
    team_->meet(mine);
    own = shared_of(*team_, std::move(own), request.in[0].bytes);
    team_->begin(call, deadline_);
  }
  std::optional<Leg> leg;
  char* slice = nullptr;
  if (has_lane(*plan)) {
    slice = own->data() + plan->begins[layout().place] * size_of(call.dtype);
    const bool coded = is_coded(call);
    const Data data{slice, call.dtype, call.op, scale_of(call, world()), coded ? call.wire : Codec::none};
    leg.emplace(*plan, lane_ranks(), transport_, scratch_, data, handshake(call));
  }
  team_sum(request, *plan, leg ? &*leg : nullptr, slice, call.dtype);
  if (leg) pump(*leg);
  if (team_ != nullptr) team_->meet(Posted{});
  operation.shared = std::move(own);
}

void Hierarchy::reduce(const Request& request) {
  const Call& call = request.call;
  const std::size_t width = size_of(call.dtype);
  const auto plan = planner_.plan(call, width);
  const bool lane = has_lane(*plan);
  const bool root_here = layout().find(call.root).first == layout().host;
  std::optional<Leg> leg;
  if (lane) {
    partial_.resize(std::max(partial_.size(), plan->counts[layout().place] * width));
    const Data data{partial_.data(), call.dtype, call.op, scale_of(call, world()),
                    is_coded(call) ? call.wire : Codec::none};
    leg.emplace(*plan, lane_ranks(), transport_, scratch_, data, handshake(call));
  }
  Leg* running = lane ? &*leg : nullptr;
  team_sum(request, *plan, running, partial_.data(), call.dtype);
  if (!root_here) {
    if (running != nullptr) pump(*running);
    return;
  }
  char* out = request.out.empty() ? nullptr : request.out[0].data;
  team_gather(request, *plan, running, partial_.data(), out, false);
  if (team_ == nullptr) std::memcpy(out, partial_.data(), request.out[0].bytes);
}

void Hierarchy::broadcast(const Request& request) {
  const Call& call = request.call;
  const std::size_t width = size_of(call.dtype);
  const auto plan = planner_.plan(call, width);
  const auto [root_host, root_place] = layout().find(call.root);
  const bool root_here = root_host == layout().host;
  const Piece& tensor = root_here && root_place == layout().place ? request.in[0] : request.out[0];
  const bool lane = has_lane(*plan);
  char* slice = tensor.data + (lane ? plan->begins[layout().place] * width : 0);
  std::optional<Leg> leg;
  if (lane) {
    leg.emplace(*plan, lane_ranks(), transport_, scratch_, Data{slice, call.dtype, call.op}, handshake(call));
  }
  Leg* running = lane ? &*leg : nullptr;
  if (root_here) {
    if (team_ != nullptr) {
      const bool root = root_place == layout().place;
      Pieces in(team_->size(), root ? tensor : Piece{}), out(team_->size());
      in[root_place] = {};
      if (!root) out[root_place] = tensor;
      team_copy(request, std::move(in), false, std::move(out));
    }
    if (running != nullptr) {
      running->provide_all();
      pump(*running);
    }
    return;
  }
  if (running != nullptr) running->provide_all();
  Request received = request;
  received.in = request.out;  // the network puts the slices there
  if (team_ != nullptr) team_->meet(places(received));
  team_gather(received, *plan, running, slice, tensor.data, true);
}

// Sends a token from every host to every host, between two meetings of the team.
void Hierarchy::barrier(const Request& request) {
  if (team_ != nullptr) team_->meet(Posted{});
  if (layout().place == 0) {
    std::uint32_t token = 0;
    Call call = request.call;
    call.kind = Kind::allreduce;  // only for the plan: the handshake carries the true call
    call.count = 1;
    call.dtype = DType::i32;
    const auto plan = planner_.plan(call, sizeof token);
    const Data data{reinterpret_cast<char*>(&token), DType::i32, Op::sum};
    Leg leg(*plan, lane_ranks(), transport_, scratch_, data, handshake(request.call));
    leg.provide_all();
    pump(leg);
  }
  if (team_ != nullptr) team_->meet(Posted{});
}

// Sends the block for each target host round this lane's ring while the team adds the block for the next host.
void Hierarchy::reduce_scatter(const Request& request) {
  if (!layout().even()) return reduce_scatter_uneven(request);
  const Call& call = request.call;
  const bool unrounded = is_unrounded(call), coded = is_coded(call);
  const DType partial = unrounded ? DType::f32 : call.dtype;
  const std::size_t width = size_of(partial), hosts = layout().hosts.size();
  const std::size_t bytes = call.count * width;
  const std::size_t line = std::max<std::size_t>(1, 64 / width);
  std::vector<Chunk> blocks;
  for (std::size_t h = 0; h < hosts; ++h) blocks.push_back({h * call.count, call.count});
  Plan plan{};
  plan.program = ring_reduce_scatter(layout().host, blocks, {hosts * call.count, (64u << 10) / width, line});
  plan.input_chunks = plan.program.input_order;
  partial_.resize(std::max(partial_.size(), hosts * bytes));
  const Data data{partial_.data(),
                  partial,
                  call.op,
                  scale_of(call, world()),
                  coded ? call.wire : Codec::none,
                  coded ? request.residual : nullptr,
                  coded && request.seed != 0 ? request.seed + static_cast<std::uint64_t>(layout().host) : 0};
  Leg leg(plan, lane_ranks(), transport_, scratch_, data, handshake(call));
  std::vector<std::uint32_t> steps(hosts, 0);
  // The ring needs the blocks of the preceding hosts first, and this host's block last.
  for (std::size_t back = 1; back <= hosts; ++back) {
    const std::size_t target = (layout().host + hosts - back) % hosts;
    Request part = request;
    part.in.clear();
    for (const int rank : layout().hosts[target]) part.in.push_back(request.in[static_cast<std::size_t>(rank)]);
    char* own = partial_.data() + target * bytes;
    if (team_ == nullptr) {
      convert(unrounded ? simd::widen_kernel(call.dtype) : nullptr, part.in[0].data, own, call.count, bytes);
    } else {
      ReducePass::Job job{};
      job.dtype = call.dtype;
      job.out_width = width;
      job.kernel = unrounded ? simd::widen_kernel(call.dtype) : simd::reduce_kernel(call.dtype, call.op);
      job.counts.assign(team_->size(), call.count);
      for (const Piece& piece : part.in) job.in.push_back(piece.data);
      job.out.assign(team_->size(), nullptr);
      job.out[team_->me()] = own;
      job.to = ReducePass::To::owner;
      job.consumed = [&leg](std::uint32_t) { leg.advance(); };
      Posted mine{};
      mine.in = place_of(part.in);
      ReducePass pass(*team_, std::move(job), mine.in, Place{});
      if (back > 1) team_->begin(call, deadline_);
      pass.publish(0);
      team_->enter(mine);
      pass.settle();
      team_->drive(pass, 1);
    }
    for (std::uint32_t step = 0; step < plan.input_chunks.size(); ++step) {
      if (plan.program.chunks[plan.input_chunks[step]].begin / std::max<std::size_t>(1, call.count) == target) {
        leg.provide(step);
      }
    }
    leg.advance();
  }
  pump(leg);
  convert(unrounded ? simd::narrow_kernel(call.dtype) : nullptr, partial_.data() + layout().host * bytes,
          request.out[0].data, call.count, bytes);
}

// Runs one reduction per target, because hosts of different sizes have no common lanes for all pieces.
void Hierarchy::reduce_scatter_uneven(const Request& request) {
  const std::size_t me = static_cast<std::size_t>(layout().hosts[layout().host][layout().place]);
  for (std::size_t target = 0; target < world(); ++target) {
    Request part = request;
    part.call.kind = Kind::reduce;
    part.call.root = static_cast<std::int32_t>(target);
    part.in = {request.in[target]};
    part.out = target == me ? request.out : Pieces{};
    if (target > 0 && team_ != nullptr) team_->begin(part.call, deadline_);
    reduce(part);
  }
}

void Hierarchy::team_copy(const Request& request, Pieces in, bool split, Pieces out) {
  CopyPass pass(*team_, {std::move(in), split, std::move(out)});
  team_->begin(request.call, deadline_);
  pass.publish(0);
  team_->enter(pass.posted());
  pass.settle();
  team_->drive(pass, 1);
}

std::uint64_t Hierarchy::settle_next(std::uint64_t chosen, Deadline deadline) {
  deadline_ = deadline;
  const auto& hosts = layout().hosts;
  if (layout().place != 0) return team_->await_next(deadline);
  std::vector<Transfer> letters(hosts.size());
  const bool leader = hosts[layout().host][0] == 0;
  for (std::size_t h = 0; h < hosts.size(); ++h) {
    if (h == layout().host) continue;
    if (!leader && hosts[h][0] != 0) continue;
    letters[h] = {reinterpret_cast<char*>(&chosen), sizeof chosen};
    leader ? transport_.send(hosts[h][0], letters[h]) : transport_.receive(0, letters[h]);
  }
  const auto waits = [](const Transfer& letter) { return letter.data != nullptr && !letter.done; };
  for (auto at = letters.begin(); at != letters.end();) {
    at = std::find_if(letters.begin(), letters.end(), waits);
    if (at != letters.end() && !transport_.progress()) {
      wait(leader ? hosts[static_cast<std::size_t>(at - letters.begin())][0] : 0);
    }
  }
  if (team_ != nullptr) team_->publish_next(chosen);
  return chosen;
}

void Hierarchy::run(Operation& operation, Deadline deadline) {
  const Request& request = operation.request;
  deadline_ = deadline;
  if (team_ != nullptr) team_->begin(request.call, deadline);
  switch (request.call.kind) {
    case Kind::allreduce:
      if (request.call.shared != 0) return allreduce_shared(operation);
      return allreduce(request);
    case Kind::reduce: return reduce(request);
    case Kind::broadcast: return broadcast(request);
    case Kind::barrier: return barrier(request);
    case Kind::reduce_scatter: return reduce_scatter(request);
    case Kind::all_gather: return all_gather(request);
    default: return direct_copies(request);
  }
}

}  // namespace ff::hfreduce
