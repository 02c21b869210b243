// A result that lies once a host, in the arena of the host's first rank, and is read by all its ranks where it lies.
//
// Thread-safe. The block is given back when every rank of the host has let go of it: the owner frees it, at once or when
// it next needs one. A rank that dies holding one keeps the block from being used again, no more.
#pragma once

#include <cstddef>
#include <memory>

#include "base/segment.hpp"
#include "hfreduce/types.hpp"

namespace ff::hfreduce {

class SharedResult {
 public:
  // A new block for `holders` ranks, in this process's arena. Throws Code::no_space.
  static std::shared_ptr<SharedResult> allocate(std::size_t bytes, std::size_t holders);
  // A peer's block: `place` was posted by the owner, `memory` is its segment as mapped here.
  static std::shared_ptr<SharedResult> attach(const Place& place, std::size_t bytes,
                                              std::shared_ptr<Segment> memory);
  ~SharedResult();
  SharedResult(const SharedResult&) = delete;
  SharedResult& operator=(const SharedResult&) = delete;

  char* data() const { return block_ + kHead; }
  std::size_t bytes() const { return bytes_; }
  Place place() const;  // of data(). REQUIRES: allocated here

  static constexpr std::size_t kHead = 128;  // in front of the data: how many hold it

 private:
  SharedResult(char* block, std::size_t bytes, std::shared_ptr<Segment> memory)
      : block_(block), bytes_(bytes), memory_(std::move(memory)) {}

  char* block_;
  std::size_t bytes_;
  std::shared_ptr<Segment> memory_;  // null: this process's arena
};

}  // namespace ff::hfreduce
