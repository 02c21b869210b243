// A program under construction: tracks the steps for which each new step must wait. Only for the builders.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "hfreduce/schedule/program.hpp"

namespace ff::hfreduce {

// Returns boundary i of `count` elements in `parts` parts; boundaries are multiples of `align`.
inline std::size_t boundary(std::size_t count, std::size_t align, std::size_t i, std::size_t parts) {
  const std::size_t lines = (count + align - 1) / align;
  const std::size_t begin = lines * i / parts * align;
  return begin < count ? begin : count;
}

inline std::size_t parts_of(std::size_t count, std::size_t chunk) {
  return chunk == 0 ? 1 : (count + chunk - 1) / chunk;
}

// Returns the smallest multiple of `align` that reaches `count` when taken `parts` times.
inline std::size_t step_of(std::size_t count, std::size_t parts, std::size_t align) {
  if (parts == 0) return align;
  return (count + parts * align - 1) / (parts * align) * align;
}

class ProgramBuilder {
 public:
  explicit ProgramBuilder(std::size_t me) { program_.me = static_cast<std::uint16_t>(me); }

  std::uint32_t add_chunk(std::size_t begin, std::size_t count) {
    program_.chunks.push_back({begin, count});
    value_.push_back(-1);
    touched_.push_back(-1);
    return static_cast<std::uint32_t>(program_.chunks.size() - 1);
  }
  // Cuts the whole buffer into chunks of equal length; the last chunk may be shorter.
  void add_chunks(const Cut& cut) {
    const std::size_t step = step_of(cut.count, parts_of(cut.count, cut.chunk), cut.align);
    for (std::size_t begin = 0; begin < cut.count; begin += step) {
      add_chunk(begin, std::min(step, cut.count - begin));
    }
  }
  std::uint32_t chunks() const { return static_cast<std::uint32_t>(program_.chunks.size()); }

  void send(std::uint32_t chunk, std::size_t peer) {
    touched_[chunk] = add(Step::Kind::send, chunk, peer, value_[chunk], false);
  }
  void receive(std::uint32_t chunk, std::size_t peer) { write(Step::Kind::receive, chunk, peer, true); }
  void reduce(std::uint32_t chunk, std::size_t peer, bool last) { write(Step::Kind::reduce, chunk, peer, last); }
  // Collects wait for one another but not for the sends, because the executor knows when the chunk may be overwritten.
  void collect(std::uint32_t chunk, std::size_t peer, bool last) {
    value_[chunk] = add(Step::Kind::collect, chunk, peer, value_[chunk], last);
  }
  void give(std::uint32_t chunk) { program_.given.push_back(chunk); }

  Program finish() {
    std::vector<bool> needed(program_.chunks.size());
    const auto need = [&](std::uint32_t chunk) {
      if (!needed[chunk]) program_.input_order.push_back(chunk);
      needed[chunk] = true;
    };
    for (const Step& step : program_.steps) {
      if (step.after < 0 && step.kind != Step::Kind::receive) need(step.chunk);
    }
    for (const std::uint32_t chunk : program_.given) need(chunk);
    return std::move(program_);
  }

 private:
  std::int32_t add(Step::Kind kind, std::uint32_t chunk, std::size_t peer, std::int32_t after, bool last) {
    program_.steps.push_back({kind, static_cast<std::uint16_t>(peer), chunk, after, last});
    return static_cast<std::int32_t>(program_.steps.size() - 1);
  }
  void write(Step::Kind kind, std::uint32_t chunk, std::size_t peer, bool last) {
    value_[chunk] = touched_[chunk] = add(kind, chunk, peer, touched_[chunk], last);
  }

  Program program_;
  std::vector<std::int32_t> value_;    // per chunk: the step that made its value, -1: local input
  std::vector<std::int32_t> touched_;  // per chunk: the last step that read or wrote it
};

}  // namespace ff::hfreduce
