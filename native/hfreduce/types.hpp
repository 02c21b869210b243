// One collective call, which must be equal on every rank, and the memory it works on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "simd/codec.hpp"
#include "simd/dtype.hpp"

namespace ff::hfreduce {

enum class Kind : std::uint32_t {
  allreduce = 1,
  reduce_scatter,
  all_gather,
  broadcast,
  reduce,
  gather,
  scatter,
  all_to_all,
  barrier,
};

// The part of a call that must be equal on all ranks. Sent over the wire and shared memory unchanged.
struct Call {
  std::uint64_t seq = 0;    // number of the operation in its group
  std::uint64_t count = 0;  // elements of one piece; 0 if ranks may differ (uneven pieces)
  Kind kind = Kind::barrier;
  DType dtype = DType::u8;
  Op op = Op::sum;
  Codec wire = Codec::none;  // between hosts
  std::int32_t root = -1;    // rank, or -1
  std::uint32_t shared = 0;  // 1: the result is one block per host
  std::uint64_t label = 0;   // the caller's identifier of the data; 0: none

  bool operator==(const Call&) const = default;
};

std::string to_string(const Call& call);

// Returns whether pieces of this kind may differ in size from pair to pair of ranks. Then calls with a count of 0
// agree, and the ranks compare the lengths of the pieces before a byte is copied.
inline bool may_be_uneven(Kind kind) {
  return kind == Kind::all_gather || kind == Kind::gather || kind == Kind::all_to_all;
}

// Returns a text like "3 elements", or "10 bytes" if the length is no multiple of the element size.
std::string amount(const Call& call, std::uint64_t bytes);

// Returns Error(collective): `giver` has a piece of `gives` bytes for `reader`, which expects another length.
Error lengths_disagree(const Call& call, int giver, std::uint64_t gives, int reader, std::uint64_t expects);

// The bytes of one rank's tensor, or of the part that belongs to one rank.
struct Piece {
  char* data = nullptr;
  std::size_t bytes = 0;
};
using Pieces = std::vector<Piece>;

// Location of adjacent pieces: in a segment of this process's arena, or anywhere (segment < 0).
struct Place {
  std::int32_t segment = -1;
  std::uint64_t offset = 0;

  bool zero_copy() const { return segment >= 0; }
};

// Returns a zero-copy place if the pieces are adjacent in one segment of the arena.
Place place_of(const Pieces& pieces);

// Returns the first element of slice `index` of `parts` in `count` elements; slices begin on cache lines of the tensor.
inline std::size_t slice_begin(std::size_t count, DType dtype, std::size_t index, std::size_t parts) {
  const std::size_t line = 64 / size_of(dtype);
  const std::size_t lines = (count + line - 1) / line;
  const std::size_t begin = lines * index / parts * line;
  return begin < count ? begin : count;
}

}  // namespace ff::hfreduce
