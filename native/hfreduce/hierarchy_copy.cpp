// The copying collectives over several hosts: every piece crosses the network once to each host that needs it.
#include <cstring>
#include <deque>

#include "hfreduce/hierarchy.hpp"

namespace ff::hfreduce {
namespace {

// Messages of one call with ranks of other hosts, each led by the call, so that a rank that calls something else is
// told so instead of being sent garbage.
class Mail {
 public:
  Mail(Transport& transport, Greeting greeting) : transport_(transport), greeting_(std::move(greeting)) {}

  void send(int rank, const Piece& piece) {
    Letter& letter = letters_.emplace_back(Letter{rank, false});
    letter.header = {const_cast<char*>(static_cast<const char*>(greeting_.header)), greeting_.bytes};
    letter.payload = {piece.data, piece.bytes};
    transport_.send(rank, letter.header);
    transport_.send(rank, letter.payload);
  }
  void receive(int rank, const Piece& piece) {
    Letter& letter = letters_.emplace_back(Letter{rank, true});
    letter.theirs.resize(greeting_.bytes);
    letter.header = {letter.theirs.data(), letter.theirs.size()};
    letter.payload = {piece.data, piece.bytes};
    transport_.receive(rank, letter.header);
  }

  // True if anything moved.
  bool advance() {
    bool moved = transport_.progress();
    for (Letter& letter : letters_) {
      if (!letter.incoming || letter.checked || !letter.header.done) continue;
      greeting_.check(letter.rank, letter.theirs.data());
      letter.checked = true;
      moved = true;
      transport_.receive(letter.rank, letter.payload);
    }
    return moved;
  }

  // A rank that something is still awaited from or on its way to; -1 when all is done.
  int waiting_for() const {
    for (const Letter& letter : letters_) {
      const bool over = letter.incoming ? letter.checked && letter.payload.done
                                        : letter.header.done && letter.payload.done;
      if (!over) return letter.rank;
    }
    return -1;
  }

 private:
  struct Letter {
    int rank;
    bool incoming;
    bool checked = false;
    Transfer header = {}, payload = {};
    std::vector<char> theirs = {};
  };

  Transport& transport_;
  Greeting greeting_;
  std::deque<Letter> letters_;  // never moved: the transport has their addresses
};

std::size_t at(int rank) { return static_cast<std::size_t>(rank); }

}  // namespace

std::vector<int> Hierarchy::peers(const Request& request) {
  const Call& call = request.call;
  std::vector<int> ranks;
  const auto add_program = [&](const Program& program) {
    const std::vector<int> mates = lane_ranks();
    for (const Step& step : program.steps) {
      if (step.kind == Step::Kind::send) ranks.push_back(mates[step.peer]);
    }
  };
  const int me = layout().hosts[layout().host][layout().place];
  if (request.priority != 0 && me == 0) {
    for (const auto& host : layout().hosts) ranks.push_back(host[0]);
  }
  switch (call.kind) {
    case Kind::allreduce:
    case Kind::reduce:
    case Kind::broadcast:
    case Kind::barrier: {
      Call planned = call;
      if (call.kind == Kind::barrier) {
        planned.kind = Kind::allreduce;
        planned.count = 1;
        planned.dtype = DType::i32;
      }
      const bool unrounded = call.wire == Codec::fp32 && is_floating(call.dtype) && call.dtype != DType::f64;
      add_program(planner_.plan(planned, unrounded ? sizeof(float) : size_of(planned.dtype))->program);
      break;
    }
    case Kind::reduce_scatter:
      if (layout().even()) {
        const std::size_t next = (layout().host + 1) % layout().hosts.size();
        ranks.push_back(layout().lane_mate(next, layout().place));
      } else {
        Call part = call;
        part.kind = Kind::reduce;
        for (std::size_t root = 0; root < world(); ++root) {
          part.root = static_cast<std::int32_t>(root);
          add_program(planner_.plan(part, size_of(call.dtype))->program);
        }
      }
      break;
    case Kind::all_gather:
      for (std::size_t h = 0; h < layout().hosts.size(); ++h) {
        const auto& host = layout().hosts[h];
        if (h != layout().host) ranks.push_back(host[layout().place % host.size()]);
      }
      break;
    case Kind::gather:
      ranks.push_back(call.root);
      break;
    case Kind::scatter:
      if (call.root != me) break;
      [[fallthrough]];
    default:
      for (std::size_t r = 0; r < world(); ++r) ranks.push_back(static_cast<int>(r));
  }
  std::vector<int> others;
  for (const int rank : ranks) {
    const bool known = std::find(others.begin(), others.end(), rank) != others.end();
    if (!known && layout().find(rank).first != layout().host) others.push_back(rank);
  }
  return others;
}

// The rank in place q of another host sends its piece to our member q modulo our size; then each team shares what its
// members have got.
void Hierarchy::all_gather(const Request& request) {
  const auto& hosts = layout().hosts;
  const auto& team = hosts[layout().host];
  Mail mail(transport_, greeting(request.call));
  for (std::size_t h = 0; h < hosts.size(); ++h) {
    if (h == layout().host) continue;
    mail.send(hosts[h][layout().place % hosts[h].size()], request.in[0]);
    for (std::size_t q = layout().place; q < hosts[h].size(); q += team.size()) {
      mail.receive(hosts[h][q], request.out[at(hosts[h][q])]);
    }
  }
  mail.advance();
  // What the members of this host have themselves needs no network.
  const auto share = [&](std::size_t h, std::size_t first) {
    Pieces in, out(team.size());
    for (std::size_t m = 0; m < team.size() && first + m < hosts[h].size(); ++m) {
      const Piece& piece = request.out[at(hosts[h][first + m])];
      if (m != layout().place) {
        out[m] = piece;
      } else {
        in.push_back(h == layout().host ? request.in[0] : piece);
      }
    }
    team_copy(request, std::move(in), false, std::move(out));
  };
  const Piece& own = request.out[at(team[layout().place])];
  if (own.data != request.in[0].data) std::memmove(own.data, request.in[0].data, own.bytes);
  if (team_ != nullptr) share(layout().host, 0);
  for (int late = mail.waiting_for(); late >= 0; late = mail.waiting_for()) {
    if (!mail.advance()) wait(late);
  }
  for (std::size_t h = 0; team_ != nullptr && h < hosts.size(); ++h) {
    if (h == layout().host) continue;
    for (std::size_t first = 0; first < hosts[h].size(); first += team.size()) share(h, first);
  }
}

// gather, scatter and all_to_all: from rank to rank.
void Hierarchy::direct_copies(const Request& request) {
  const Call& call = request.call;
  const auto& team = layout().hosts[layout().host];
  const int me = team[layout().place];
  const bool to_all = call.kind == Kind::all_to_all || (call.kind == Kind::scatter && call.root == me);
  const bool from_all = call.kind == Kind::all_to_all || (call.kind == Kind::gather && call.root == me);
  Mail mail(transport_, greeting(call));
  const auto is_here = [&](int rank) { return layout().find(rank).first == layout().host; };
  for (std::size_t r = 0; r < world(); ++r) {
    const int rank = static_cast<int>(r);
    if (is_here(rank)) continue;
    if (to_all) {
      mail.send(rank, request.in[r]);
    } else if (call.kind == Kind::gather && rank == call.root) {
      mail.send(rank, request.in[0]);
    }
    if (from_all) {
      mail.receive(rank, request.out[r]);
    } else if (call.kind == Kind::scatter && rank == call.root) {
      mail.receive(rank, request.out[0]);
    }
  }
  mail.advance();
  if (team_ == nullptr) {
    if (to_all && from_all) std::memmove(request.out[at(me)].data, request.in[at(me)].data, request.out[at(me)].bytes);
    if (call.root == me && call.kind == Kind::gather) std::memmove(request.out[at(me)].data, request.in[0].data, request.in[0].bytes);
    if (call.root == me && call.kind == Kind::scatter) std::memmove(request.out[0].data, request.in[at(me)].data, request.out[0].bytes);
  } else {
    const bool split = call.kind != Kind::gather;
    Pieces in, out(team.size());
    for (std::size_t m = 0; m < team.size(); ++m) {
      if (to_all) in.push_back(request.in[at(team[m])]);
      if (from_all) out[m] = request.out[at(team[m])];
      if (call.kind == Kind::scatter && team[m] == call.root) out[m] = request.out[0];
    }
    const bool root_here = call.root >= 0 && is_here(call.root);
    if (call.kind == Kind::gather && root_here) in.push_back(request.in[0]);
    if (call.kind == Kind::all_to_all || root_here) team_copy(request, std::move(in), split, std::move(out));
  }
  for (int late = mail.waiting_for(); late >= 0; late = mail.waiting_for()) {
    if (!mail.advance()) wait(late);
  }
}

}  // namespace ff::hfreduce
