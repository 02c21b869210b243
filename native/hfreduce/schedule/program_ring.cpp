// Ring and chain programs.
//
// The ring runs in segments of M chunks; member j owns chunk j of a segment. A segment takes 2(M-1) rounds: in round r
// member i sends the chunk that it finished in round r-1, first partial sums, then final values. Segment s does its
// round r in slot s + r, newest segment first. A chunk that arrives in one slot is sent on in the next slot; meanwhile
// the other segments keep the link busy. Results become final in the order of the buffer.
#include <algorithm>

#include "hfreduce/schedule/program_builder.hpp"

namespace ff::hfreduce {
namespace {

constexpr std::uint32_t kNone = UINT32_MAX;  // an empty chunk: no member sends it

using Segments = std::vector<std::vector<std::uint32_t>>;  // [segment][owner] -> chunk

struct Rounds {
  std::size_t me, members;

  // Returns the owner of the chunk that member i sends in round r; rounds 0 .. M-2 reduce, M-1 .. 2M-3 gather.
  std::size_t owner(std::size_t i, std::size_t round) const {
    const std::size_t back = round < members - 1 ? round + 1 : round - (members - 1);
    return (i + 2 * members - back) % members;
  }

  // Writes rounds first .. end-1 of all segments.
  void run(ProgramBuilder& draft, const Segments& segments, std::size_t first, std::size_t end) const {
    const std::size_t rounds = end - first;
    for (std::size_t slot = 0; slot + 1 < segments.size() + rounds; ++slot) {
      const std::size_t newest = std::min(slot, segments.size() - 1);
      const std::size_t oldest = slot < rounds ? 0 : slot - rounds + 1;
      for (std::size_t s = newest + 1; s-- > oldest;) {
        one_round(draft, segments[s], first + slot - s);
      }
    }
  }

  void one_round(ProgramBuilder& draft, const std::vector<std::uint32_t>& segment, std::size_t round) const {
    const std::size_t next = (me + 1) % members, previous = (me + members - 1) % members;
    const std::uint32_t outgoing = segment[owner(me, round)];
    const std::uint32_t arriving = segment[owner(previous, round)];
    if (outgoing != kNone) draft.send(outgoing, next);
    if (arriving == kNone) return;
    if (round < members - 1) {
      draft.reduce(arriving, previous, round == members - 2);
    } else {
      draft.receive(arriving, previous);
    }
  }
};

// Cuts the buffer into segments with chunks of equal length; the last segment may be shorter.
Segments cut_whole(ProgramBuilder& draft, std::size_t members, const Cut& cut) {
  Segments segments;
  const std::size_t parts = parts_of(cut.count, cut.chunk * members);
  const std::size_t step = step_of(cut.count, parts, cut.align * members);
  for (std::size_t begin = 0; begin < cut.count; begin += step) {
    const std::size_t length = std::min(step, cut.count - begin);
    segments.emplace_back(members, kNone);
    for (std::size_t owner = 0; owner < members; ++owner) {
      const std::size_t from = boundary(length, cut.align, owner, members);
      const std::size_t to = boundary(length, cut.align, owner + 1, members);
      if (to > from) segments.back()[owner] = draft.add_chunk(begin + from, to - from);
    }
  }
  return segments;
}

Segments cut_blocks(ProgramBuilder& draft, const std::vector<Chunk>& blocks, const Cut& cut) {
  std::size_t longest = 0;
  for (const Chunk& block : blocks) longest = std::max(longest, block.count);
  const std::size_t parts = parts_of(longest, cut.chunk);
  Segments segments(parts, std::vector<std::uint32_t>(blocks.size(), kNone));
  for (std::size_t s = 0; s < parts; ++s) {
    for (std::size_t owner = 0; owner < blocks.size(); ++owner) {
      const Chunk& block = blocks[owner];
      const std::size_t begin = boundary(block.count, cut.align, s, parts);
      const std::size_t end = boundary(block.count, cut.align, s + 1, parts);
      if (end > begin) segments[s][owner] = draft.add_chunk(block.begin + begin, end - begin);
    }
  }
  return segments;
}

void give_own(ProgramBuilder& draft, const Segments& segments, std::size_t owner) {
  for (const auto& segment : segments) {
    if (segment[owner] != kNone) draft.give(segment[owner]);
  }
}

}  // namespace

Program ring_allreduce(std::size_t me, std::size_t members, const Cut& cut) {
  ProgramBuilder draft(me);
  const Segments segments = cut_whole(draft, members, cut);
  if (members == 1) give_own(draft, segments, 0);
  else if (!segments.empty()) Rounds{me, members}.run(draft, segments, 0, 2 * (members - 1));
  return draft.finish();
}

Program ring_reduce_scatter(std::size_t me, const std::vector<Chunk>& blocks, const Cut& cut) {
  ProgramBuilder draft(me);
  const std::size_t members = blocks.size();
  const Segments segments = cut_blocks(draft, blocks, cut);
  if (members == 1) give_own(draft, segments, 0);
  else if (!segments.empty()) Rounds{me, members}.run(draft, segments, 0, members - 1);
  return draft.finish();
}

Program ring_all_gather(std::size_t me, const std::vector<Chunk>& blocks, const Cut& cut) {
  ProgramBuilder draft(me);
  const std::size_t members = blocks.size();
  const Segments segments = cut_blocks(draft, blocks, cut);
  give_own(draft, segments, me);
  if (members > 1 && !segments.empty()) {
    Rounds{me, members}.run(draft, segments, members - 1, 2 * (members - 1));
  }
  return draft.finish();
}

Program chain_broadcast(std::size_t me, std::size_t members, std::size_t root, const Cut& cut) {
  ProgramBuilder draft(me);
  draft.add_chunks(cut);
  const std::size_t place = (me + members - root) % members;
  for (std::uint32_t c = 0; c < draft.chunks(); ++c) {
    if (place == 0) draft.give(c);
    else draft.receive(c, (me + members - 1) % members);
    if (place + 1 < members) draft.send(c, (me + 1) % members);
  }
  return draft.finish();
}

Program chain_reduce(std::size_t me, std::size_t members, std::size_t root, const Cut& cut) {
  ProgramBuilder draft(me);
  draft.add_chunks(cut);
  const std::size_t place = (me + members - root) % members;
  for (std::uint32_t c = 0; c < draft.chunks(); ++c) {
    if (place + 1 < members) draft.reduce(c, (me + 1) % members, place == 0);
    if (place > 0) draft.send(c, (me + members - 1) % members);
    else if (members == 1) draft.give(c);
  }
  return draft.finish();
}

}  // namespace ff::hfreduce
