// The two data movements between the ranks of a host: a reduction and a copy.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <vector>

#include "hfreduce/host/team.hpp"
#include "simd/kernels.hpp"

namespace ff::hfreduce {

struct Range {
  std::size_t begin, count;  // elements of a slice
};

// Element-wise reduction over the members, divided among owners: owner c reduces slice c of all inputs, in the order of
// the members.
class ReducePass final : public Pass {
 public:
  enum class To { owner, all, one };  // members that get a slice's result

  struct Job {
    DType dtype;            // of the inputs
    std::size_t out_width;  // bytes of an element of the results
    simd::ReduceFn kernel;
    double scale = 1.0;
    std::vector<std::size_t> counts;  // [owners] elements of each slice
    std::vector<const char*> in;      // [owners] this rank's input for each slice
    std::vector<char*> out;           // [owners] place of each slice's result in this rank's memory; empty: none
    To to = To::all;
    std::size_t one = 0;  // the member of To::one
    // Pieces prescribed by the leg between hosts: step k moves grid[owner][k]. Empty: pieces of equal size.
    std::vector<std::vector<Range>> grid;
    std::function<void(std::uint32_t)> consumed;  // called after a step's piece of this rank's own slice was reduced
  };

  // `in` and `out` are the places that this member posts; all slices lie there side by side.
  ReducePass(Team& team, Job job, Place in, Place out);

  void settle() override;
  void publish(std::uint32_t step) override;
  void consume(std::uint32_t step) override;
  void collect(std::uint32_t step) override;

  bool everybody_zero_copy() const;
  // Reduces elements of an owner's slice from and to all members' zero-copy memory. REQUIRES: everybody_zero_copy().
  void reduce_in_place(std::size_t owner, Range range);
  std::size_t count(std::size_t owner) const { return job_.counts[owner]; }

 private:
  Range range(std::size_t owner, std::uint32_t step) const;
  bool wants(std::size_t member) const;  // true if the member gets the results of all owners

  Team& team_;
  Job job_;
  Place in_, out_;
  std::size_t width_;
  std::size_t piece_;                    // elements of a slice in a staging slot
  std::vector<std::size_t> begins_;      // [owners] elements before each slice
  std::array<char*, kMembers> in_of_{};  // [members] mapped input, nullptr if staged
  std::array<char*, kMembers> out_of_{};
};

// Reads parts that other members publish: one part for all readers, or a part for each reader. Every member posts the
// number of bytes that it gives to and expects from each member. Every member compares all pairs before it copies a
// byte: either all members continue, or all throw the same Error(collective).
class CopyPass final : public Pass {
 public:
  struct Job {
    Pieces in;           // [members] pieces that this rank gives to each; bytes = 0: none
    bool split = false;  // true: a part for each reader; false: one part for all readers. Equal on all members
    Pieces out;          // [members] pieces that this rank takes from each; bytes = 0: none
  };

  CopyPass(Team& team, Job job);

  Posted posted() const;  // argument for Team::enter()
  void settle() override;
  void publish(std::uint32_t step) override;
  void consume(std::uint32_t step) override;

 private:
  void compare_lengths() const;

  Team& team_;
  Job job_;
  Place in_;
  Piece common_;       // not split: the part that all readers read
  std::size_t piece_;  // bytes of a part in a step
  std::array<const char*, kMembers> in_of_{};
};

// The last leg after the network: owner c publishes its slice piece by piece as it becomes final, and all other members
// copy it.
class GatherPass final : public Pass {
 public:
  struct Job {
    std::size_t width;                         // bytes of an element
    std::vector<std::size_t> begins;           // [owners] elements before each slice
    std::vector<std::vector<Range>> grid;      // [owners][step] pieces of each slice
    const char* own = nullptr;                 // this rank's slice, if it is an owner
    char* out = nullptr;                       // destination of the whole tensor; null: not taken
    bool in_tensor = false;                    // every member's own slice lies in the tensor that was posted as `in`
    Place place;                               // as posted by this rank
    std::function<bool(std::uint32_t)> final;  // whether this rank's piece of a step is final
    std::function<bool()> busy;                // whether the network needs this thread
    std::function<void()> idle;                // serves the network briefly
  };

  GatherPass(Team& team, Job job);

  void settle() override;
  void publish(std::uint32_t step) override;
  void consume(std::uint32_t step) override;
  bool ready(std::uint32_t step) override;
  bool busy() override { return job_.busy && job_.busy(); }
  void idle() override { job_.idle(); }

 private:
  bool owner() const { return team_.me() < job_.grid.size(); }

  Team& team_;
  Job job_;
  std::array<const char*, kMembers> slice_of_{};  // [owners] mapped, nullptr if staged
};

}  // namespace ff::hfreduce
