#include "hfreduce/schedule/exchange.hpp"

#include <algorithm>
#include <new>
#include <string>
#include <utility>

#include "base/error.hpp"

namespace ff::hfreduce {

using StepKind = Step::Kind;

void Scratch::Free::operator()(char* buffer) const { ::operator delete(buffer, std::align_val_t{kAlignment}); }

void Scratch::fit(std::size_t bytes) {
  if (bytes <= bytes_) return;
  free_.clear();
  all_.clear();
  bytes_ = bytes;
}

char* Scratch::take() {
  if (free_.empty()) {
    all_.emplace_back(static_cast<char*>(::operator new(bytes_, std::align_val_t{kAlignment})));
    free_.push_back(all_.back().get());
  }
  char* buffer = free_.back();
  free_.pop_back();
  return buffer;
}

void Scratch::give(char* buffer) { free_.push_back(buffer); }

Exchange::Exchange(const Program& program, const std::vector<int>& ranks, Transport& transport, Scratch& scratch,
                   const Data& data, Handshake handshake, const Limits& limits)
    : program_(program),
      transport_(transport),
      scratch_(scratch),
      data_(data),
      handshake_(std::move(handshake)),
      limits_(limits),
      coded_(data.codec != Codec::none),
      reduce_(simd::reduce_kernel(data.dtype, data.op)),
      parts_(program.chunks.size()),
      transfers_(program.steps.size()),
      finished_(program.steps.size()),
      sends_(program.steps.size()),
      all_finals_(program.given.size()) {
  std::vector<std::int32_t> channel_of(ranks.size(), -1);
  for (std::uint32_t k = 0; k < program.steps.size(); ++k) {
    const Step& s = step(k);
    std::int32_t& index = channel_of[s.peer];
    if (index < 0) {
      index = static_cast<std::int32_t>(channels_.size());
      channels_.push_back({.rank = ranks[s.peer]});
    }
    Channel& channel = channels_[static_cast<std::size_t>(index)];
    (s.kind == StepKind::send ? channel.out : channel.in).push_back(k);
    if (s.kind == StepKind::send) ++sends_of(s.after, s.chunk);
    parts_[s.chunk].collected |= s.kind == StepKind::collect;
    all_finals_ += s.last;
  }
  check_operation();
  for (const std::uint32_t chunk : program.given) parts_[chunk].given = true;
  std::size_t longest = 0;
  for (const Chunk& chunk : program.chunks) longest = std::max(longest, chunk.count);
  scratch.fit(std::max(longest * size_of(data.dtype), simd::encoded_bytes(data.codec, data.dtype, longest)));
}

void Exchange::check_operation() const {
  const auto adds = [](const Step& s) { return s.kind == StepKind::reduce || s.kind == StepKind::collect; };
  const bool any = std::any_of(program_.steps.begin(), program_.steps.end(), adds);
  const bool sum = data_.op == Op::sum || data_.op == Op::avg;
  if ((any && reduce_ == nullptr) || (coded_ && !sum)) {
    throw Error(Code::invalid, std::string("unsupported: ") + name_of(data_.op) + " of " + name_of(data_.dtype) +
                                   (coded_ ? " with a wire codec" : ""));
  }
}

void Exchange::provide(std::uint32_t chunk) {
  Part& part = parts_[chunk];
  part.provided = true;
  if (!part.given) return;
  if (data_.scale != 1) {
    void* own = data_of(chunk);
    const void* source = own;
    reduce_(&own, 1, &source, 1, program_.chunks[chunk].count, data_.scale);
  }
  if (!coded_ || part.sends == 0) make_final(chunk);
}

bool Exchange::advance() {
  bool moved = pump();
  moved |= transport_.progress();
  moved |= pump();
  return moved;
}

std::optional<std::uint32_t> Exchange::pop_final() {
  if (popped_ == final_.size()) return std::nullopt;
  return final_[popped_++];
}

int Exchange::waiting_for() const {
  int rank = -1;
  for (const Channel& channel : channels_) {
    if (channel.applied_in < channel.in.size() && !transfers_[channel.in[channel.applied_in]].done) {
      return channel.rank;
    }
    if (channel.done_out < channel.posted_out) rank = channel.rank;
  }
  return rank;
}

bool Exchange::pump() {
  bool moved = false;
  for (Channel& channel : channels_) {
    if (!channel.handshake_sent) send_handshake(channel);
    moved |= settle_sends(channel);
    moved |= settle_receives(channel);
    moved |= post_sends(channel);
    moved |= post_receives(channel);
  }
  return moved;
}

void Exchange::send_handshake(Channel& channel) {
  channel.handshake_sent = true;
  if (!channel.out.empty()) {
    // Sent from the caller's memory; transports do not write to it.
    channel.header_out = {static_cast<char*>(const_cast<void*>(handshake_.header)), handshake_.bytes};
    transport_.send(channel.rank, channel.header_out);
  }
  if (!channel.in.empty()) {
    channel.their_header.resize(handshake_.bytes);
    channel.header_in = {channel.their_header.data(), handshake_.bytes};
    transport_.receive(channel.rank, channel.header_in);
  }
}

bool Exchange::settle_sends(Channel& channel) {
  const std::size_t before = channel.done_out;
  while (channel.done_out < channel.posted_out) {
    const std::uint32_t k = channel.out[channel.done_out];
    if (!transfers_[k].done) break;
    Part& part = parts_[step(k).chunk];
    if (--sends_of(step(k).after, step(k).chunk) == 0 && coded_) {
      scratch_.give(std::exchange(part.wire, nullptr));
      forwarding_ -= made_by(step(k).after, StepKind::receive);
    }
    finish(k);
    ++channel.done_out;
  }
  return channel.done_out != before;
}

bool Exchange::settle_receives(Channel& channel) {
  if (channel.in.empty()) return false;
  const bool unchecked = !channel.checked;
  if (unchecked) {
    if (!channel.header_in.done) return false;
    handshake_.check(channel.rank, channel.their_header.data());
    channel.checked = true;
  }
  const std::size_t before = channel.applied_in;
  while (channel.applied_in < channel.posted_in) {
    const std::uint32_t k = channel.in[channel.applied_in];
    if (!transfers_[k].done || !apply(k)) break;
    ++channel.applied_in;
  }
  return unchecked || channel.applied_in != before;
}

bool Exchange::post_sends(Channel& channel) {
  const std::size_t before = channel.posted_out;
  while (channel.posted_out < channel.out.size() && channel.posted_out < channel.done_out + limits_.sends) {
    const std::uint32_t k = channel.out[channel.posted_out];
    const Step& s = step(k);
    if (!ready(s)) break;
    if (coded_ && parts_[s.chunk].wire == nullptr) encode(s);
    transfers_[k] = {coded_ ? parts_[s.chunk].wire : data_of(s.chunk), wire_bytes(s.chunk)};
    transport_.send(channel.rank, transfers_[k]);
    ++channel.posted_out;
  }
  return channel.posted_out != before;
}

bool Exchange::post_receives(Channel& channel) {
  const std::size_t before = channel.posted_in;
  while (channel.checked && channel.posted_in < channel.in.size() &&
         channel.posted_in < channel.applied_in + limits_.receives) {
    const std::uint32_t k = channel.in[channel.posted_in];
    const Step& s = step(k);
    if (in_place(s) ? !overwritable(s) : !may_hold(k)) break;
    transfers_[k] = {in_place(s) ? data_of(s.chunk) : scratch_.take(), wire_bytes(s.chunk)};
    transport_.receive(channel.rank, transfers_[k]);
    ++channel.posted_in;
  }
  return channel.posted_in != before;
}

bool Exchange::ready(const Step& s) const {
  return s.after >= 0 ? finished_[static_cast<std::size_t>(s.after)] != 0 : parts_[s.chunk].provided;
}

bool Exchange::overwritable(const Step& s) const {
  return s.after < 0 || finished_[static_cast<std::size_t>(s.after)] != 0;
}

// Bounds the received encodings that wait to be forwarded to a slow peer. Beyond the limit only the earliest step that
// has not arrived may hold one more, because all other steps wait for that step in the end (program.hpp, invariant 2).
bool Exchange::may_hold(std::uint32_t k) {
  const bool forwards = step(k).kind == StepKind::receive && sends_[k] > 0;
  if (!forwards || forwarding_ < limits_.forwarding) return true;
  while (step(earliest_).kind == StepKind::send || transfers_[earliest_].done) ++earliest_;
  return k == earliest_;
}

bool Exchange::made_by(std::int32_t source, StepKind kind) const {
  return source >= 0 && step(static_cast<std::uint32_t>(source)).kind == kind;
}

bool Exchange::in_place(const Step& s) const { return s.kind == StepKind::receive && !coded_; }

std::uint32_t& Exchange::sends_of(std::int32_t source, std::uint32_t chunk) {
  return source >= 0 ? sends_[static_cast<std::size_t>(source)] : parts_[chunk].sends;
}

char* Exchange::data_of(std::uint32_t chunk) const {
  return data_.base + program_.chunks[chunk].begin * size_of(data_.dtype);
}

std::size_t Exchange::wire_bytes(std::uint32_t chunk) const {
  return simd::encoded_bytes(data_.codec, data_.dtype, program_.chunks[chunk].count);
}

// Encodes the value that `s` sends. If the value must be equal on all members, replaces the local value by the value
// that the other members will decode.
void Exchange::encode(const Step& s) {
  Part& part = parts_[s.chunk];
  const Chunk& chunk = program_.chunks[s.chunk];
  float* residual = data_.residual == nullptr ? nullptr : data_.residual + chunk.begin;
  const std::uint64_t mixed = data_.seed ^ ((s.chunk + 1) * 0x9E3779B97F4A7C15u);
  part.wire = scratch_.take();
  simd::encode(data_.codec, data_.dtype, data_of(s.chunk), chunk.count, part.wire, residual,
               data_.seed == 0 ? 0 : mixed | 1);
  const bool whole = s.after < 0 ? part.given : program_.steps[static_cast<std::size_t>(s.after)].last;
  if (!whole && !part.collected) return;
  simd::decode(data_.codec, data_.dtype, part.wire, chunk.count, data_of(s.chunk), 1);
  if (whole) make_final(s.chunk);
}

// Uses the data received in step k; returns false if the chunk cannot take the data yet.
bool Exchange::apply(std::uint32_t k) {
  const Step& s = step(k);
  if (!(s.kind == StepKind::receive ? overwritable(s) : ready(s))) return false;
  Part& part = parts_[s.chunk];
  const std::size_t count = program_.chunks[s.chunk].count;
  char* arrived = transfers_[k].data;
  void* own = data_of(s.chunk);
  const double scale = s.last ? data_.scale : 1;
  if (s.kind == StepKind::collect) {
    if (s.last && part.sends > 0) return false;
    if (s.last) combine(k);
  } else if (s.kind == StepKind::receive) {
    if (coded_) {
      simd::decode(data_.codec, data_.dtype, arrived, count, own, 1);
      if (sends_[k] > 0) part.wire = arrived, ++forwarding_;
      else scratch_.give(arrived);
    }
  } else {
    if (coded_) {
      simd::decode_add(data_.codec, data_.dtype, arrived, count, own, scale);
    } else {
      const void* terms[2] = {own, arrived};
      reduce_(&own, 1, terms, 2, count, scale);
    }
    scratch_.give(arrived);
  }
  finish(k);
  return true;
}

// The last collect of a chunk: adds all inputs in member order and rounds once.
void Exchange::combine(std::uint32_t k) {
  const Step& last = step(k);
  const std::size_t count = program_.chunks[last.chunk].count;
  void* own = data_of(last.chunk);
  std::vector<const void*> terms;
  std::vector<char*> buffers;
  bool own_is_in = false;
  for (auto s = static_cast<std::int32_t>(k); s >= 0; s = step(static_cast<std::uint32_t>(s)).after) {
    char* buffer = transfers_[static_cast<std::size_t>(s)].data;
    if (coded_) {
      char* values = scratch_.take();
      simd::decode(data_.codec, data_.dtype, buffer, count, values, 1);
      scratch_.give(std::exchange(buffer, values));
    }
    if (!own_is_in && step(static_cast<std::uint32_t>(s)).peer < program_.me) {
      terms.push_back(own);
      own_is_in = true;
    }
    terms.push_back(buffer);
    buffers.push_back(buffer);
  }
  if (!own_is_in) terms.push_back(own);
  std::reverse(terms.begin(), terms.end());
  reduce_(&own, 1, terms.data(), terms.size(), count, data_.scale);
  for (char* buffer : buffers) scratch_.give(buffer);
}

void Exchange::finish(std::uint32_t k) {
  finished_[k] = 1;
  ++done_steps_;
  const Step& s = step(k);
  // A reduced value that must still be encoded becomes final in encode().
  const bool later = coded_ && s.kind == StepKind::reduce && sends_[k] > 0;
  if (s.last && !later) make_final(s.chunk);
}

void Exchange::make_final(std::uint32_t chunk) {
  final_.push_back(chunk);
  ++finals_;
}

}  // namespace ff::hfreduce
