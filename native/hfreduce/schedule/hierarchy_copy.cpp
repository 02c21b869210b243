// The copying collectives over several hosts: every piece is sent once to each host that needs it.
#include <algorithm>
#include <cstring>
#include <deque>
#include <utility>

#include "hfreduce/schedule/hierarchy.hpp"

namespace ff::hfreduce {
namespace {

using Lengths = std::vector<std::uint64_t>;

// Messages of one call to and from ranks of other hosts. A message has three parts: the call, lengths, a piece. A rank
// that makes another call or expects other lengths gets an error instead of wrong bytes. No round trip separates the
// parts.
class CheckedMessages {
 public:
  // Makes the error for lengths that differ: entry `index` of the sender's row is `theirs`, `mine` was expected.
  using OnMismatch = std::function<Error(int rank, std::size_t index, std::uint64_t theirs, std::uint64_t mine)>;

  CheckedMessages(Transport& transport, Handshake handshake, OnMismatch on_mismatch)
      : transport_(transport), handshake_(std::move(handshake)), on_mismatch_(std::move(on_mismatch)) {}

  void send(int rank, const Piece& piece, Lengths lengths) {
    Message& message = messages_.emplace_back(Message{rank, false, std::move(lengths)});
    message.header = {const_cast<char*>(static_cast<const char*>(handshake_.header)), handshake_.bytes};
    message.row = bytes_of(message.lengths);
    message.payload = {piece.data, piece.bytes};
    for (Transfer* part : {&message.header, &message.row, &message.payload}) transport_.send(rank, *part);
  }
  // The piece is written only if the message's lengths are the expected ones.
  void receive(int rank, const Piece& piece, Lengths expected) {
    Message& message = messages_.emplace_back(Message{rank, true, std::move(expected)});
    message.theirs.resize(handshake_.bytes);
    message.header = {message.theirs.data(), message.theirs.size()};
    message.payload = {piece.data, piece.bytes};
    transport_.receive(rank, message.header);
  }
  // Tokens are messages without a piece: they report that their sender has reached this point.
  void send_token(int rank) { send(rank, {}, {}); }
  void receive_token(int rank) { receive(rank, {}, {}); }

  // True if anything moved.
  bool advance() {
    bool moved = transport_.progress();
    for (Message& message : messages_) {
      if (message.incoming && !message.checked) moved |= read(message);
    }
    return moved;
  }

  // Returns a rank whose message is not checked yet, or that cannot have read this rank's message yet. Returns -1 if
  // there is none: then every other rank can check this rank's messages without this thread.
  int unread() const {
    for (const Message& message : messages_) {
      if (message.incoming ? !message.checked : !message.header.done || !message.row.done) return message.rank;
    }
    return -1;
  }
  // Returns a rank from which data is missing or to which data is still being sent; -1 when all is done.
  int waiting_for() const {
    for (const Message& message : messages_) {
      const bool read = message.incoming ? message.checked : message.header.done && message.row.done;
      if (!read || !message.payload.done) return message.rank;
    }
    return -1;
  }

 private:
  struct Message {
    int rank;
    bool incoming;
    Lengths lengths;  // sent, or expected
    bool handshake_done = false, checked = false;
    Transfer header = {}, row = {}, payload = {};
    std::vector<char> theirs = {};
    Lengths their_lengths = {};
  };

  static Transfer bytes_of(Lengths& lengths) {
    return {reinterpret_cast<char*>(lengths.data()), lengths.size() * sizeof(std::uint64_t)};
  }

  // Reads the part of the message that has arrived; true if anything moved. REQUIRES: it is not checked.
  bool read(Message& message) {
    if (!message.header.done) return false;
    const bool handshake_done = std::exchange(message.handshake_done, true);
    if (!handshake_done) {
      handshake_.check(message.rank, message.theirs.data());
      message.their_lengths.resize(message.lengths.size());
      message.row = bytes_of(message.their_lengths);
      transport_.receive(message.rank, message.row);
    }
    if (!message.row.done) return !handshake_done;
    for (std::size_t i = 0; i < message.lengths.size(); ++i) {
      if (message.their_lengths[i] == message.lengths[i]) continue;
      throw on_mismatch_(message.rank, i, message.their_lengths[i], message.lengths[i]);
    }
    message.checked = true;
    transport_.receive(message.rank, message.payload);
    return true;
  }

  Transport& transport_;
  Handshake handshake_;
  OnMismatch on_mismatch_;
  std::deque<Message> messages_;  // elements never move, because the transport has their addresses
};

std::size_t at(int rank) { return static_cast<std::size_t>(rank); }

// Compares the lengths of the piece that this rank sends to itself, before anything is sent to other ranks.
void check_own(const Call& call, int rank, const Piece& from, const Piece& to) {
  if (from.bytes != to.bytes) throw lengths_disagree(call, rank, from.bytes, rank, to.bytes);
}

void copy_own(const Piece& from, const Piece& to) {
  if (to.data != from.data && to.bytes != 0) std::memmove(to.data, from.data, to.bytes);
}

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
    case Kind::gather: ranks.push_back(call.root); [[fallthrough]];  // the root tells all ranks that all lengths agree
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

// The rank in place q of another host sends its piece to this team's member q modulo the team's size; then each team
// shares the pieces of its members. With its piece a rank sends the lengths that it expects from all ranks. So when a
// rank completes, its team has compared its lengths with those of all other hosts. The copy inside the team compares
// the lengths of its members.
void Hierarchy::all_gather(const Request& request) {
  const Call& call = request.call;
  const auto& hosts = layout().hosts;
  const auto& team = hosts[layout().host];
  const int me = team[layout().place];
  const Piece& own = request.out[at(me)];
  check_own(call, me, request.in[0], own);
  Lengths row;
  for (const Piece& piece : request.out) row.push_back(piece.bytes);
  CheckedMessages messages(
      transport_, handshake(call), [&](int rank, std::size_t giver, std::uint64_t theirs, std::uint64_t mine) {
        const int from = static_cast<int>(giver);
        if (from == rank) return lengths_disagree(call, rank, theirs, me, mine);
        if (from == me) return lengths_disagree(call, me, mine, rank, theirs);
        return Error(Code::collective, "ranks disagree: in " + to_string(call) + " rank " + std::to_string(rank) +
                                           " expects " + amount(call, theirs) + " of rank " + std::to_string(from) +
                                           ", rank " + std::to_string(me) + " expects " + amount(call, mine));
      });
  for (std::size_t h = 0; h < hosts.size(); ++h) {
    if (h == layout().host) continue;
    messages.send(hosts[h][layout().place % hosts[h].size()], request.in[0], row);
    for (std::size_t q = layout().place; q < hosts[h].size(); q += team.size()) {
      messages.receive(hosts[h][q], request.out[at(hosts[h][q])], row);
    }
  }
  messages.advance();
  // The pieces of this host's own members need no network.
  const auto share = [&](std::size_t h, std::size_t first) {
    Pieces in(team.size()), out(team.size());
    for (std::size_t m = 0; m < team.size() && first + m < hosts[h].size(); ++m) {
      const Piece& piece = request.out[at(hosts[h][first + m])];
      if (m != layout().place) {
        out[m] = piece;
      } else {
        in.assign(team.size(), h == layout().host ? request.in[0] : piece);
        in[m] = {};
      }
    }
    team_copy(request, std::move(in), false, std::move(out));
  };
  copy_own(request.in[0], own);
  if (team_ != nullptr) share(layout().host, 0);
  for (int late = messages.waiting_for(); late >= 0; late = messages.waiting_for()) {
    if (!messages.advance()) wait(late);
  }
  for (std::size_t h = 0; team_ != nullptr && h < hosts.size(); ++h) {
    if (h == layout().host) continue;
    for (std::size_t first = 0; first < hosts[h].size(); first += team.size()) share(h, first);
  }
}

// Runs gather, scatter and all_to_all from rank to rank. If lengths may differ, no rank completes before it knows that
// they agree everywhere. A team completes its copy after all its members have read their messages, and then sends
// tokens to the other hosts.
void Hierarchy::direct_copies(const Request& request) {
  const Call& call = request.call;
  const auto& hosts = layout().hosts;
  const auto& team = hosts[layout().host];
  const int me = team[layout().place];
  const bool at_root = call.root == me, exchange = call.kind == Kind::all_to_all;
  const bool gather = call.kind == Kind::gather, scatter = call.kind == Kind::scatter;
  const bool to_all = exchange || (scatter && at_root), from_all = exchange || (gather && at_root);
  const auto is_in = [&](int rank, std::size_t host) { return layout().find(rank).first == host; };
  const auto is_here = [&](int rank) { return is_in(rank, layout().host); };
  // Pieces for a rank and from a rank.
  const auto given = [&](int to) {
    return to_all ? request.in[at(to)] : gather && to == call.root ? request.in[0] : Piece{};
  };
  const auto taken = [&](int from) {
    return from_all ? request.out[at(from)] : scatter && from == call.root ? request.out[0] : Piece{};
  };
  check_own(call, me, given(me), taken(me));
  CheckedMessages messages(transport_, handshake(call),
                           [&](int rank, std::size_t, std::uint64_t theirs, std::uint64_t mine) {
                             return lengths_disagree(call, rank, theirs, me, mine);
                           });
  for (std::size_t r = 0; r < world(); ++r) {
    const int rank = static_cast<int>(r);
    if (is_here(rank)) continue;
    if (to_all || (gather && rank == call.root)) messages.send(rank, given(rank), {given(rank).bytes});
    if (from_all || (scatter && rank == call.root)) messages.receive(rank, taken(rank), {taken(rank).bytes});
  }
  messages.advance();
  for (int late = messages.unread(); late >= 0; late = messages.unread()) {
    if (!messages.advance()) wait(late);
  }
  if (team_ == nullptr) {
    copy_own(given(me), taken(me));
  } else if (exchange || is_here(call.root)) {
    Pieces in, out;
    for (const int mate : team) {
      in.push_back(given(mate));
      out.push_back(taken(mate));
    }
    team_copy(request, std::move(in), !gather, std::move(out));
  }
  for (std::size_t h = 0; h < hosts.size(); ++h) {
    if (h == layout().host || scatter) continue;
    for (std::size_t p = 0; p < hosts[h].size(); ++p) {
      if (exchange ? p % team.size() == layout().place : at_root) messages.send_token(hosts[h][p]);
    }
    if (exchange) messages.receive_token(hosts[h][layout().place % hosts[h].size()]);
    if (gather && is_in(call.root, h)) messages.receive_token(call.root);
  }
  for (int late = messages.waiting_for(); late >= 0; late = messages.waiting_for()) {
    if (!messages.advance()) wait(late);
  }
}

}  // namespace ff::hfreduce
