// Double binary tree programs (Sanders, Speck, Traeff 2009), aware of zones.
//
// In each zone every second member may have children in the first tree, and the remaining members in the second tree. A
// member that may have children has room for two. A zone of m members, of which a may have children, needs m-1 places
// for its own members. So 2a-(m-1) places are left for other zones: one place in each tree if m is even, two places in
// one tree and none in the other if m is odd. Odd zones alternate, so that each tree has enough places for all zones.
#include <algorithm>
#include <deque>

#include "hfreduce/schedule/program_builder.hpp"

namespace ff::hfreduce {
namespace {

struct Zone {
  std::uint32_t label;
  std::vector<std::uint16_t> members;  // without `root`
  bool has_root = false;
  std::size_t odd = 0;  // members at even (0) or odd (1) indices may have children in the first tree
};

// Returns the zones in order of appearance, but the zone of `root` first.
std::vector<Zone> zones_of(const std::vector<std::uint32_t>& labels, int root) {
  std::vector<Zone> zones;
  if (root >= 0) zones.push_back({labels[static_cast<std::size_t>(root)], {}, true, 0});
  for (std::size_t i = 0; i < labels.size(); ++i) {
    auto zone = std::find_if(zones.begin(), zones.end(), [&](const Zone& z) { return z.label == labels[i]; });
    if (zone == zones.end()) zone = zones.insert(zones.end(), Zone{labels[i], {}, false, 0});
    if (static_cast<int>(i) != root) zone->members.push_back(static_cast<std::uint16_t>(i));
  }
  std::size_t turn = 0;
  for (Zone& zone : zones) {
    if (zone.members.size() % 2 == 1) zone.odd = turn++ % 2;
  }
  return zones;
}

// A zone's members in the order in which one tree places them: members that may have children come first, so that there
// is always a free place.
struct Subtree {
  struct Node {
    std::uint16_t member;
    std::size_t room;
  };
  std::vector<Node> nodes;
  std::size_t spare = 0;               // places left for other zones
  std::vector<std::uint16_t> hanging;  // heads (first members) of the zones that take these places

  Subtree(const Zone& zone, std::size_t tree, int root, bool others) {
    std::size_t room = 0;
    if (zone.has_root) nodes.push_back({static_cast<std::uint16_t>(root), 1});
    for (const std::size_t want : {std::size_t{2}, std::size_t{0}}) {
      for (std::size_t k = 0; k < zone.members.size(); ++k) {
        const std::size_t has = (k + zone.odd) % 2 == tree ? 2 : 0;
        if (has == want) nodes.push_back({zone.members[k], has});
      }
    }
    for (const Node& node : nodes) room += node.room;
    if (zone.has_root && others && room < nodes.size()) ++nodes[0].room, ++room;
    spare = room - (nodes.size() - 1);
  }
};

void link(Tree& tree, std::uint16_t parent, std::uint16_t child) {
  tree.parent[child] = parent;
  tree.children[parent].push_back(child);
}

// Fills the tree breadth first. Other zones hang as high as possible: a zone's head keeps one place for its own zone
// and offers its second place to another zone.
void fill(Tree& tree, const Subtree& zone) {
  std::size_t placed = 1, hung = 0;
  for (std::size_t i = 0; i < zone.nodes.size(); ++i) {
    const auto& [member, room] = zone.nodes[i];
    const std::size_t own = zone.nodes.size() - placed;
    const std::size_t keep = std::min<std::size_t>(own > 0 ? 1 : 0, room);
    const std::size_t give = std::min(room - keep, zone.hanging.size() - hung);
    for (std::size_t k = 0; k < std::min(room - give, own); ++k) {
      link(tree, member, zone.nodes[placed++].member);
    }
    for (std::size_t k = 0; k < give; ++k) link(tree, member, zone.hanging[hung++]);
  }
}

Tree one_tree(const std::vector<Zone>& zones, std::size_t members, std::size_t which, int root) {
  std::vector<Subtree> subtrees;
  for (const Zone& zone : zones) subtrees.emplace_back(zone, which, root, zones.size() > 1);
  std::stable_sort(subtrees.begin() + (root >= 0 ? 1 : 0), subtrees.end(),
                   [](const Subtree& a, const Subtree& b) { return a.spare > b.spare; });
  std::size_t next = 1;
  for (Subtree& zone : subtrees) {
    for (std::size_t k = 0; k < zone.spare && next < subtrees.size(); ++k) {
      zone.hanging.push_back(subtrees[next++].nodes[0].member);
    }
  }
  Tree tree{std::vector<int>(members, -1), std::vector<std::vector<std::uint16_t>>(members),
            std::vector<std::uint32_t>(members), 0};
  for (const Subtree& zone : subtrees) fill(tree, zone);
  std::deque<std::uint16_t> queue{subtrees[0].nodes[0].member};
  for (; !queue.empty(); queue.pop_front()) {
    for (const std::uint16_t child : tree.children[queue.front()]) {
      tree.depth[child] = tree.depth[queue.front()] + 1;
      tree.height = std::max(tree.height, tree.depth[child]);
      queue.push_back(child);
    }
  }
  return tree;
}

// One message of this member. `slot` gives messages the same order at both ends: one slot per tree level.
struct Event {
  std::size_t slot;
  std::uint32_t chunk;
  Step::Kind kind;
  std::uint16_t peer;
  bool last;
};

void add_up(std::vector<Event>& events, const Tree& tree, std::size_t me, std::uint32_t chunk) {
  const std::size_t slot = chunk / 2 + tree.height - tree.depth[me];
  const auto& children = tree.children[me];
  for (const std::uint16_t child : children) {
    const bool last = tree.parent[me] < 0 && child == children.back();
    events.push_back({slot - 1, chunk, Step::Kind::reduce, child, last});
  }
  if (tree.parent[me] >= 0) {
    const auto parent = static_cast<std::uint16_t>(tree.parent[me]);
    events.push_back({slot, chunk, Step::Kind::send, parent, false});
  }
}

void add_down(std::vector<Event>& events, const Tree& tree, std::size_t me, std::uint32_t chunk) {
  const std::size_t slot = chunk / 2 + tree.height + tree.depth[me];
  if (tree.parent[me] >= 0) {
    const auto parent = static_cast<std::uint16_t>(tree.parent[me]);
    events.push_back({slot - 1, chunk, Step::Kind::receive, parent, true});
  }
  for (const std::uint16_t child : tree.children[me]) {
    events.push_back({slot, chunk, Step::Kind::send, child, false});
  }
}

Program tree_program(std::size_t me, const std::vector<std::uint32_t>& zones, int root, bool up, bool down,
                     const Cut& cut) {
  ProgramBuilder draft(me);
  draft.add_chunks(cut);
  const std::array<Tree, 2> trees = double_tree(zones, root);
  std::vector<Event> events;
  for (std::uint32_t c = 0; c < draft.chunks(); ++c) {
    const Tree& tree = trees[c % 2];
    if (up) add_up(events, tree, me, c);
    if (down) add_down(events, tree, me, c);
    const bool alone = zones.size() == 1;
    if (alone || (!up && tree.parent[me] < 0)) draft.give(c);
  }
  std::stable_sort(events.begin(), events.end(), [](const Event& a, const Event& b) {
    return a.slot != b.slot ? a.slot < b.slot : a.chunk > b.chunk;
  });
  for (const Event& event : events) {
    switch (event.kind) {
      case Step::Kind::send: draft.send(event.chunk, event.peer); break;
      case Step::Kind::receive: draft.receive(event.chunk, event.peer); break;
      default: draft.reduce(event.chunk, event.peer, event.last);
    }
  }
  return draft.finish();
}

}  // namespace

std::array<Tree, 2> double_tree(const std::vector<std::uint32_t>& labels, int root) {
  const std::vector<Zone> zones = zones_of(labels, root);
  return {one_tree(zones, labels.size(), 0, root), one_tree(zones, labels.size(), 1, root)};
}

Program tree_allreduce(std::size_t me, const std::vector<std::uint32_t>& zones, const Cut& cut) {
  return tree_program(me, zones, -1, true, true, cut);
}

Program tree_reduce(std::size_t me, const std::vector<std::uint32_t>& zones, std::size_t root, const Cut& cut) {
  return tree_program(me, zones, static_cast<int>(root), true, false, cut);
}

Program tree_broadcast(std::size_t me, const std::vector<std::uint32_t>& zones, std::size_t root, const Cut& cut) {
  return tree_program(me, zones, static_cast<int>(root), false, true, cut);
}

}  // namespace ff::hfreduce
