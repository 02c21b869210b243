// A result that exists once per host, in the arena of the host's first rank; all ranks of the host read it in place.
//
// Thread-safe. The block is freed when every rank of the host has released it: the owner frees it at once, or when it
// next needs a block. If a rank dies while it holds a block, the block is never reused.
#pragma once

#include <cstddef>
#include <memory>

#include "base/memory/segment.hpp"
#include "hfreduce/types.hpp"

namespace ff::hfreduce {

class SharedResult {
 public:
  // Allocates a block for `holders` ranks in this process's arena. Throws Code::no_space.
  static std::shared_ptr<SharedResult> allocate(std::size_t bytes, std::size_t holders);
  // Attaches to a peer's block. `place`: posted by the owner. `memory`: the owner's segment, as mapped in this process.
  static std::shared_ptr<SharedResult> attach(const Place& place, std::size_t bytes, std::shared_ptr<Segment> memory);
  ~SharedResult();
  SharedResult(const SharedResult&) = delete;
  SharedResult& operator=(const SharedResult&) = delete;

  char* data() const { return block_ + kHead; }
  std::size_t bytes() const { return bytes_; }
  Place place() const;  // place of data(). REQUIRES: this process allocated the block

  static constexpr std::size_t kHead = 128;  // header before the data: the number of holders

 private:
  SharedResult(char* block, std::size_t bytes, std::shared_ptr<Segment> memory)
      : block_(block), bytes_(bytes), memory_(std::move(memory)) {}

  char* block_;
  std::size_t bytes_;
  std::shared_ptr<Segment> memory_;  // null: this process's arena
};

}  // namespace ff::hfreduce
