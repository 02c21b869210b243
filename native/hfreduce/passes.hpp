// The two ways in which bytes move between the ranks of a host: a reduction and a copy.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <vector>

#include "hfreduce/team.hpp"
#include "simd/kernels.hpp"

namespace ff::hfreduce {

struct Range {
  std::size_t begin, count;  // elements of a slice
};

// Element-wise reduction over the members, divided among owners: owner c reduces slice c of everybody's input, in the order of
// the members.
class ReducePass final : public Pass {
 public:
  enum class To { owner, all, one };  // who gets the result of a slice

  struct Job {
    DType dtype;                       // of the inputs
    std::size_t out_width;             // bytes of an element of the results
    simd::ReduceFn kernel;
    double scale = 1.0;
    std::vector<std::size_t> counts;   // [owners] elements of each slice
    std::vector<const char*> in;       // [owners] my input for each slice
    std::vector<char*> out;            // [owners] where the result of each slice belongs in my memory, if anywhere
    To to = To::all;
    std::size_t one = 0;               // the member of To::one
    // Legs between hosts prescribe the pieces: grid[owner][k] is moved in step k. Empty: pieces of equal size.
    std::vector<std::vector<Range>> grid;
    std::function<void(std::uint32_t)> consumed;  // after one's own slice of a step has been reduced
  };

  // Places are where members posted in and out: slices side by side.
  ReducePass(Team& team, Job job, Place in, Place out);

  void settle() override;
  void publish(std::uint32_t step) override;
  void consume(std::uint32_t step) override;
  void collect(std::uint32_t step) override;

  bool everybody_zero_copy() const;
  // Reduces elements of an owner's slice from and to everybody's zero-copy memory. REQUIRES: everybody_zero_copy().
  void reduce_in_place(std::size_t owner, Range range);
  std::size_t count(std::size_t owner) const { return job_.counts[owner]; }

 private:
  Range range(std::size_t owner, std::uint32_t step) const;
  bool wants(std::size_t member) const;  // some result of others

  Team& team_;
  Job job_;
  Place in_, out_;
  std::size_t width_;
  std::size_t piece_;                      // elements of a slice in a staging slot
  std::vector<std::size_t> begins_;        // [owners] elements before each slice
  std::array<char*, kMembers> in_of_{};    // [members] mapped input, nullptr if staged
  std::array<char*, kMembers> out_of_{};
};

// Reads what others publish: one part for all readers, or a part for each. Every member posts what it gives to whom
// and expects from whom, and every member compares all pairs before a byte is copied: either all go on, or all
// throw the same Error(collective).
class CopyPass final : public Pass {
 public:
  struct Job {
    Pieces in;                 // [members] what I give to each, bytes = 0: nothing
    bool split = false;        // a part for each member, else the same part for all that read: alike on all members
    Pieces out;                // [members] what I take from each, bytes = 0: nothing
  };

  CopyPass(Team& team, Job job);

  Posted posted() const;  // what to enter the team with
  void settle() override;
  void publish(std::uint32_t step) override;
  void consume(std::uint32_t step) override;

 private:
  void compare_lengths() const;

  Team& team_;
  Job job_;
  Place in_;
  Piece common_;           // not split: the part that all read
  std::size_t piece_;      // bytes of a part in a step
  std::array<const char*, kMembers> in_of_{};
};

// The way back from the legs between hosts: owner c publishes its slice piece by piece as it becomes final, all others
// copy it.
class GatherPass final : public Pass {
 public:
  struct Job {
    std::size_t width;                            // bytes of an element
    std::vector<std::size_t> begins;              // [owners] elements before each slice
    std::vector<std::vector<Range>> grid;         // [owners][step] pieces of each slice
    const char* own = nullptr;                    // my slice, if I am an owner
    char* out = nullptr;                          // the whole tensor, where I take it
    bool in_tensor = false;                       // everybody's own slice lies in the tensor that was posted as `in`
    Place place;                                  // what I posted
    std::function<bool(std::uint32_t)> final;     // is my piece of a step final
    std::function<bool()> busy;                   // does the network need this thread
    std::function<void()> idle;                   // serves it for a moment
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
