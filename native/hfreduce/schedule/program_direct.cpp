// Programs for small buffers.
#include <bit>

#include "hfreduce/schedule/program_builder.hpp"

namespace ff::hfreduce {

Program direct_allreduce(std::size_t me, std::size_t members, const Cut& cut) {
  ProgramBuilder draft(me);
  draft.add_chunks(cut);
  for (std::uint32_t c = 0; c < draft.chunks(); ++c) {
    if (members == 1) draft.give(c);
    // Each member begins with a different peer, so that no member receives from all at once.
    for (std::size_t k = 1; k < members; ++k) draft.send(c, (me + k) % members);
    const std::size_t last_peer = me + 1 == members ? members - 2 : members - 1;
    for (std::size_t peer = 0; peer < members; ++peer) {
      if (peer != me) draft.collect(c, peer, peer == last_peer);
    }
  }
  return draft.finish();
}

// Places are counted from the root. In round k every place below 2^k sends to the place 2^k above it.
Program binomial_broadcast(std::size_t me, std::size_t members, std::size_t root, const Cut& cut) {
  ProgramBuilder draft(me);
  draft.add_chunks(cut);
  const std::size_t place = (me + members - root) % members;
  const auto member = [&](std::size_t of) { return (of + root) % members; };
  for (std::uint32_t c = 0; c < draft.chunks(); ++c) {
    if (place == 0) draft.give(c);
    else draft.receive(c, member(place - std::bit_floor(place)));
    const std::size_t first = place == 0 ? 1 : 2 * std::bit_floor(place);
    for (std::size_t up = first; place + up < members; up *= 2) draft.send(c, member(place + up));
  }
  return draft.finish();
}

}  // namespace ff::hfreduce
