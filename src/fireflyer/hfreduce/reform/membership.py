"""Agreement on the members of a group's next epoch: a state machine without I/O, threads or clock.

The members of one epoch agree on the view of the next epoch: its members and their ranks. Each
member runs one `Membership`. The protocol is Paxos for a single value (Lamport 2001); its acceptors
are the members of the old view:

    coordinator                                members
                                           <-  Here
    Ask(ballot)                            ->
                                           <-  Vote(ballot, accepted ballot and view, newcomers)
    Propose(ballot, view)                  ->
                                           <-  Accept(ballot)
    Decided(view)                          ->  all old members, including those that are left out

The lowest rank that is believed alive coordinates. If it does not respond, the next rank takes over
with a higher ballot. If votes for the new coordinator report accepted views, it must propose the
one with the highest ballot. Any two quorums share a member, so two different views of one epoch are
never both decided, even if messages are lost or delayed and ranks crash. A rank that is wrongly
believed dead receives a view that lacks this rank, and is fenced.

The quorum is more than half of the old members, or exactly half of them with rank 0. Any two such
sets share a rank, so at most one part of a partitioned network continues. The caller may give a
number of members instead. A smaller quorum survives more deaths: with quorum 1, a group of two
survives the death of rank 0. However, a partitioned network can then leave two live groups of the
same name, so use a smaller quorum only if partitions are impossible.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from fireflyer.hfreduce.topology import RankInfo

Ballot = tuple[int, int]
"""Round, and the rank that leads it; ballots are ordered by round, then by rank."""


class Member(msgspec.Struct, frozen=True):
    """A member of a view; its index in the view is its rank.

    Attributes:
        previous: rank in the previous view; -1 for a newcomer.
    """

    info: RankInfo = msgspec.field(name="card")
    previous: int


class View(msgspec.Struct, frozen=True):
    """Members of one epoch: survivors in the order of their old ranks, then newcomers."""

    epoch: int
    members: tuple[Member, ...]

    def rank_of(self, previous: int) -> int | None:
        """Returns the new rank of an old member; None if it was left out."""
        for rank, member in enumerate(self.members):
            if member.previous == previous:
                return rank
        return None


class Here(msgspec.Struct, frozen=True, tag="Here"):
    """Announcement: the sender takes part and treats the receiver as the coordinator."""


class Ask(msgspec.Struct, frozen=True, tag="Ask"):
    """Request for votes in this ballot."""

    ballot: Ballot


class Vote(msgspec.Struct, frozen=True, tag="Vote"):
    """Vote in this ballot, and promise to ignore earlier ballots."""

    ballot: Ballot
    accepted_in: Ballot | None
    accepted: View | None
    newcomers: tuple[RankInfo, ...]


class Propose(msgspec.Struct, frozen=True, tag="Propose"):
    """Proposal of a view."""

    ballot: Ballot
    view: View


class Accept(msgspec.Struct, frozen=True, tag="Accept"):
    """Acceptance of the ballot's proposal."""

    ballot: Ballot


class Outdated(msgspec.Struct, frozen=True, tag="Outdated"):
    """Rejection: the sender has promised a later ballot."""

    ballot: Ballot
    promised: Ballot


class Decided(msgspec.Struct, frozen=True, tag="Decided"):
    """Announcement of the decided view."""

    view: View


Message = Here | Ask | Vote | Propose | Accept | Outdated | Decided


@dataclass(frozen=True)
class Start:
    """Start of this rank's participation; the rank believes the suspects dead."""

    suspects: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Received:
    sender: int
    message: Message


@dataclass(frozen=True)
class Lost:
    """Loss of a rank: it cannot be reached."""

    rank: int


@dataclass(frozen=True)
class Elapsed:
    """Expiry of the timer of the last `Wait`."""


@dataclass(frozen=True)
class Arrived:
    """Arrival of a process that wants to become a member."""

    newcomer: RankInfo


Event = Start | Received | Lost | Elapsed | Arrived


@dataclass(frozen=True)
class Send:
    rank: int
    message: Message


@dataclass(frozen=True)
class Wait:
    """Request for a timer that ends in `Elapsed` and replaces the previous timer.

    A coordinator waits for slow members (`leading`); another member waits longer, for a
    coordinator.
    """

    leading: bool


@dataclass(frozen=True)
class Install:
    """Decision for a view that contains this rank."""

    view: View


@dataclass(frozen=True)
class Fence:
    """Decision for a view without this rank."""

    view: View


Action = Send | Wait | Install | Fence


@dataclass
class _Round:
    """A coordinator's state in its ballot."""

    ballot: Ballot
    votes: dict[int, Vote] = field(default_factory=dict)
    proposal: View | None = None
    accepts: set[int] = field(default_factory=set)


def has_quorum(ranks: Collection[int], world: int) -> bool:
    """Returns True if these ranks of `world` old members form the default quorum."""
    return 2 * len(ranks) > world or (2 * len(ranks) == world and 0 in ranks)


class Membership:
    """One member's part in the agreement on one view.

    Args:
        rank: rank of this member in the old view.
        members: infos of the old view, by rank.
        epoch: epoch of the view to agree on.
        quorum: number of votes that decide; default `has_quorum`.

    Raises:
        ValueError: `quorum` is not between 1 and the number of members.
    """

    def __init__(
        self, rank: int, members: Sequence[RankInfo], epoch: int, quorum: int | None = None
    ) -> None:
        self.rank = rank
        self.members = tuple(members)
        self.epoch = epoch
        if quorum is not None and not 1 <= quorum <= len(members):
            raise ValueError(f"invalid quorum {quorum}: expected 1 to {len(members)}")
        self._quorum = quorum
        self.decided: View | None = None
        self._suspects: set[int] = set()
        self._coordinator = -1  # the coordinator that this rank follows, once it takes part
        self._newcomers: list[RankInfo] = []
        self._promised: Ballot = (0, -1)
        self._accepted_in: Ballot | None = None
        self._accepted: View | None = None
        self._round: _Round | None = None
        self._own: deque[Message] = deque()  # messages to this rank itself
        self._actions: list[Action] = []

    @property
    def voters(self) -> int:
        """Number of votes so far in this rank's own ballot, for a message to the user."""
        return len(self._round.votes) if self._round else 0

    @property
    def needed(self) -> str:
        """Description of the quorum, for a message to the user."""
        if self._quorum is not None:
            return f"{self._quorum} are needed"
        return "more than half are needed, or half with rank 0"

    def step(self, event: Event) -> list[Action]:
        """Processes an event and returns the actions to perform, in this order."""
        match event:
            case Start(suspects):
                self._suspects |= suspects - {self.rank}
                self._lead_if_lowest()
            case Received(sender, message):
                self._suspects.discard(sender)
                self._receive(sender, message)
            case Lost(rank):
                if rank != self.rank:
                    self._suspects.add(rank)
                    self._suspicion_grew()
            case Elapsed():
                self._elapsed()
            case Arrived(newcomer):
                self._add_newcomers([newcomer])
        while self._own:
            self._receive(self.rank, self._own.popleft())
        actions, self._actions = self._actions, []
        return actions

    def _decides(self, ranks: Collection[int]) -> bool:
        if self._quorum is not None:
            return len(ranks) >= self._quorum
        return has_quorum(ranks, len(self.members))

    def _alive(self) -> set[int]:
        return set(range(len(self.members))) - self._suspects

    def _add_newcomers(self, infos: Iterable[RankInfo]) -> None:
        self._newcomers += [info for info in infos if info not in self._newcomers]

    def _send(self, rank: int, message: Message) -> None:
        if rank == self.rank:
            self._own.append(message)
        else:
            self._actions.append(Send(rank, message))

    def _send_all(self, message: Message) -> None:
        for rank in range(len(self.members)):
            self._send(rank, message)

    def _lead_if_lowest(self) -> None:
        lowest = min(self._alive())
        if lowest == self.rank:
            self._lead()
            return
        if lowest != self._coordinator:  # else that rank has this rank's `Here` already
            self._coordinator = lowest
            self._send(lowest, Here())
        self._actions.append(Wait(leading=False))

    def _lead(self) -> None:
        self._coordinator = self.rank
        self._round = _Round((self._promised[0] + 1, self.rank))
        self._promised = self._round.ballot
        self._send_all(Ask(self._round.ballot))  # also to suspects: they may be alive
        self._actions.append(Wait(leading=True))

    def _suspicion_grew(self) -> None:
        if self.decided is not None:
            return
        if self._round is None:
            if min(self._alive()) != self._coordinator:
                self._lead_if_lowest()
        elif self._round.proposal is None:
            self._propose_if_complete(self._round)
        else:
            self._decide_if_complete(self._round)

    def _elapsed(self) -> None:
        if self.decided is not None:
            return
        current = self._round
        if current is None:
            self._suspects.add(min(self._alive()))
            self._suspects.discard(self.rank)
            self._lead_if_lowest()
            return
        heard = set(current.votes) if current.proposal is None else current.accepts
        if not self._decides(heard):
            self._lead()  # a new ballot repeats messages that were lost
            return
        self._suspects |= self._alive() - heard
        self._suspicion_grew()

    def _receive(self, sender: int, message: Message) -> None:
        if isinstance(message, Decided):
            self._learn(message.view)
            return
        if self.decided is not None:
            if isinstance(message, Here | Ask | Propose):
                self._send(sender, Decided(self.decided))
            return
        match message:
            case Here():
                current = self._round
                if current is not None and current.proposal is None:
                    self._send(sender, Ask(current.ballot))
            case Ask(ballot):
                if self._follow(sender, ballot):
                    newcomers = tuple(self._newcomers)
                    vote = Vote(ballot, self._accepted_in, self._accepted, newcomers)
                    self._send(sender, vote)
            case Propose(ballot, view):
                if self._follow(sender, ballot):
                    self._accepted_in, self._accepted = ballot, view
                    self._send(sender, Accept(ballot))
            case Vote(ballot):
                current = self._round
                if current is not None and current.ballot == ballot and current.proposal is None:
                    current.votes[sender] = message
                    self._propose_if_complete(current)
            case Accept(ballot):
                current = self._round
                if current is not None and current.ballot == ballot:
                    current.accepts.add(sender)
                    self._decide_if_complete(current)
            case Outdated(ballot, promised):
                if self._round is not None and self._round.ballot == ballot:
                    self._round = None
                    self._promised = max(self._promised, promised)
                    self._actions.append(Wait(leading=False))

    def _follow(self, sender: int, ballot: Ballot) -> bool:
        """Returns True if `ballot` is the latest; if so, promises to ignore all earlier ballots."""
        if ballot < self._promised:
            self._send(sender, Outdated(ballot, self._promised))
            return False
        self._promised = ballot
        if sender != self.rank:
            self._round = None
            self._actions.append(Wait(leading=False))
        return True

    def _propose_if_complete(self, current: _Round) -> None:
        votes = current.votes
        if not self._decides(votes) or not self._alive() <= set(votes):
            return
        accepted = [
            (vote.accepted_in, vote.accepted)
            for vote in votes.values()
            if vote.accepted_in is not None and vote.accepted is not None
        ]
        if accepted:
            view = max(accepted, key=lambda pair: pair[0])[1]  # this view may have been decided
        else:
            for rank in sorted(votes):
                self._add_newcomers(votes[rank].newcomers)
            survivors = [Member(self.members[rank], rank) for rank in sorted(votes)]
            kept = {member.info for member in survivors}
            new = [Member(info, -1) for info in self._newcomers if info not in kept]
            view = View(self.epoch, (*survivors, *new))
        current.proposal = view
        for rank in votes:
            self._send(rank, Propose(current.ballot, view))
        self._actions.append(Wait(leading=True))

    def _decide_if_complete(self, current: _Round) -> None:
        assert current.proposal is not None
        late = self._alive() & set(current.votes) - current.accepts
        if self._decides(current.accepts) and not late:
            self._learn(current.proposal)
            for rank in range(len(self.members)):
                if rank != self.rank:
                    self._send(rank, Decided(current.proposal))

    def _learn(self, view: View) -> None:
        if self.decided is None:
            self.decided = view
            self._round = None
            inside = view.rank_of(self.rank) is not None
            self._actions.append(Install(view) if inside else Fence(view))
