#include "hfreduce/types.hpp"

#include "hfreduce/arena.hpp"

namespace ff::hfreduce {

std::string to_string(const Call& call) {
  static constexpr const char* kKinds[] = {"?",         "allreduce", "reduce_scatter", "all_gather",
                                           "broadcast", "reduce",    "gather",         "scatter",
                                           "all_to_all", "barrier"};
  const auto kind = static_cast<std::uint32_t>(call.kind);
  std::string text = std::string(kKinds[kind <= 9 ? kind : 0]) + " #" + std::to_string(call.seq) + "(";
  if (call.kind == Kind::barrier) return text + ")";
  text += std::to_string(call.count) + " x " + name_of(call.dtype);
  const bool reduces = call.kind == Kind::allreduce || call.kind == Kind::reduce_scatter ||
                       call.kind == Kind::reduce;
  if (reduces) text += std::string(", ") + name_of(call.op);
  if (call.root >= 0) text += ", root " + std::to_string(call.root);
  static constexpr const char* kCodecs[] = {"", ", wire fp32", ", wire bf16", ", wire fp16", ", wire int8"};
  const auto codec = static_cast<std::uint32_t>(call.wire);
  text += kCodecs[codec <= 4 ? codec : 0];
  if (call.shared != 0) text += ", shared";
  return text + ")";
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
