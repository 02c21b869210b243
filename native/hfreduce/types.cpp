#include "hfreduce/types.hpp"

#include "hfreduce/engine/arena.hpp"

namespace ff::hfreduce {

std::string to_string(const Call& call) {
  static constexpr const char* kKinds[] = {"?",      "allreduce", "reduce_scatter", "all_gather", "broadcast",
                                           "reduce", "gather",    "scatter",        "all_to_all", "barrier"};
  const auto kind = static_cast<std::uint32_t>(call.kind);
  std::string text = std::string(kKinds[kind <= 9 ? kind : 0]) + " #" + std::to_string(call.seq) + "(";
  if (call.kind == Kind::barrier) return text + ")";
  if (call.count != 0 || !may_be_uneven(call.kind)) text += std::to_string(call.count) + " x ";
  text += name_of(call.dtype);
  const bool reduces = call.kind == Kind::allreduce || call.kind == Kind::reduce_scatter || call.kind == Kind::reduce;
  if (reduces) text += std::string(", ") + name_of(call.op);
  if (call.root >= 0) text += ", root " + std::to_string(call.root);
  static constexpr const char* kCodecs[] = {"", ", wire fp32", ", wire bf16", ", wire fp16", ", wire int8"};
  const auto codec = static_cast<std::uint32_t>(call.wire);
  text += kCodecs[codec <= 4 ? codec : 0];
  if (call.shared != 0) text += ", shared";
  if (call.label != 0) text += ", label " + std::to_string(call.label);
  return text + ")";
}

std::string amount(const Call& call, std::uint64_t bytes) {
  const std::size_t width = size_of(call.dtype);
  return bytes % width == 0 ? std::to_string(bytes / width) + " elements" : std::to_string(bytes) + " bytes";
}

Error lengths_disagree(const Call& call, int giver, std::uint64_t gives, int reader, std::uint64_t expects) {
  return Error(Code::collective, "ranks disagree: in " + to_string(call) + " rank " + std::to_string(giver) + " has " +
                                     amount(call, gives) + " for rank " + std::to_string(reader) + ", which expects " +
                                     amount(call, expects));
}

Place place_of(const Pieces& pieces) {
  if (pieces.empty()) return {};
  std::size_t total = 0;
  for (const Piece& piece : pieces) {
    if (piece.data != pieces[0].data + total) return {};
    total += piece.bytes;
  }
  const auto found = Arena::of_process().find(pieces[0].data, total);
  return found ? Place{found->segment, found->offset} : Place{};
}

}  // namespace ff::hfreduce
