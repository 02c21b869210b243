"""Membership of a chain: a pure function of the chain's last version and its targets' reports.

docs/internals/fs3-chain.md defines the states and rules; "rule N" in a comment is rule N of that
page.
"""

import enum
from collections.abc import Callable, Mapping, Sequence

import msgspec


class Public(enum.IntEnum):
    """State of a member, decided by the manager; the numbers order the members of a chain."""

    SERVING = 0
    """The member is up to date and serves reads and writes."""
    RECOVERING = 1
    """The member, a former LASTSRV, fetches missing data from LASTSRV members, and then serves."""
    LASTSRV = 2
    """Last serving: the member was serving when the chain lost its last serving member."""
    SYNCING = 3
    """The member follows the serving members; the writes that it missed are being copied to it."""
    WAITING = 4
    """The member is alive and waits for its turn to sync."""
    OFFLINE = 5
    """The member is not alive."""


class LocalState(enum.IntEnum):
    """State that a target reports of itself."""

    ONLINE = 0
    """The target has just started, or writes do not pass it."""
    UPTODATE = 1
    """The target has finished the task of its public state, at the chain version that it reports."""
    FAULTY = 2
    """The target's contents do not let it follow the chain, or its disk fails."""


class Local(msgspec.Struct, frozen=True, array_like=True):
    """Report of an alive target.

    Attributes:
        incarnation: number of the start of the target's process, from 1.
        version: chain version at which the target became UPTODATE.
        store: number of the target's store, drawn when the empty store was created.
    """

    incarnation: int
    state: LocalState = LocalState.ONLINE
    version: int = 0
    store: int = 0


class Member(msgspec.Struct, frozen=True, array_like=True):
    """Target as a member of a chain.

    Attributes:
        incarnation: incarnation of the target that was made SERVING, RECOVERING or SYNCING; 0 in
            other states.
        store: store with which the target was made SERVING or RECOVERING, kept while LASTSRV; 0:
            any.
    """

    target: int
    state: Public
    incarnation: int = 0
    store: int = 0


class Chain(msgspec.Struct, frozen=True, array_like=True):
    """Version of a chain; its members are in the order of their states, the head first."""

    id: int
    version: int
    members: tuple[Member, ...]

    @classmethod
    def new(cls, chain: int, targets: Sequence[int]) -> "Chain":
        """Returns a chain that never served: all its targets count as the last serving ones.

        Raises:
            ValueError: there is no target, or a target occurs twice.
        """
        if not targets or len(set(targets)) != len(targets):
            raise ValueError(
                f"invalid targets {list(targets)} of chain {chain}: expected one or more, each once"
            )
        return cls(chain, 1, tuple(Member(target, Public.LASTSRV) for target in targets))

    def targets(self, *states: Public) -> tuple[int, ...]:
        """Returns the targets in any of these states, in order; all targets if none is given."""
        return tuple(m.target for m in self.members if not states or m.state in states)

    @property
    def path(self) -> tuple[int, ...]:
        """Targets that a write passes, head first."""
        return self.targets(Public.SERVING, Public.SYNCING)


ACTIVE = (Public.SERVING, Public.RECOVERING, Public.SYNCING)
"""States that hold for one incarnation only."""
HOLDERS = (Public.RECOVERING, Public.LASTSRV)
"""States of members that hold all acknowledged writes, if no member serves."""


def holds_state(member: Member, locals_: Mapping[int, Local]) -> bool:
    """Returns whether an active member stays active: alive, same process, not FAULTY (rule 1)."""
    local = locals_.get(member.target)
    return (
        local is not None
        and local.incarnation == member.incarnation
        and local.state is not LocalState.FAULTY
    )


def next_chain(chain: Chain, locals_: Mapping[int, Local], proceed: bool = False) -> Chain:
    """Returns the chain that follows from its targets' reports: `chain` or its next version.

    Args:
        locals_: reports of the alive targets: those whose node has a valid lease.
        proceed: do not wait any longer for last serving targets that are not alive.
    """
    members = _leave(chain, locals_)
    members = [_promote(member, chain.version, locals_) for member in members]
    if not _serves(members):
        members = _recover(members, locals_, proceed)
    if _serves(members):
        members = [_retire(member) for member in members]
    members = [_aliveness(member, locals_) for member in members]
    if _serves(members):
        members = _start_sync(members, locals_)
    ordered = tuple(sorted(members, key=_rank))
    if ordered == chain.members:
        return chain
    return Chain(chain.id, chain.version + 1, ordered)


def dismissed(before: Chain, after: Chain) -> set[int]:
    """Returns the targets whose process has an active state in `before` but not in `after`."""
    stay = {(m.target, m.incarnation) for m in after.members if m.state in ACTIVE}
    active = [m for m in before.members if m.state in ACTIVE]
    return {m.target for m in active if (m.target, m.incarnation) not in stay}


def needs_answer_of(chain: Chain, locals_: Mapping[int, Local]) -> tuple[int, ...]:
    """Returns the serving targets of which one must answer before `next_chain` is published.

    If some serving members leave, the members that seem to stay may also be dead, which is not
    detected yet. A change that is published too early could leave such a dead member as the only
    LASTSRV.
    """
    serving = [member for member in chain.members if member.state is Public.SERVING]
    staying = tuple(member.target for member in serving if holds_state(member, locals_))
    return staying if len(staying) < len(serving) else ()


def restart_from(chain: Chain, target: int) -> Chain:
    """Restarts a chain: the operator declares that `target` holds the data that is left.

    Raises:
        ValueError: the target is no member, or the chain has a serving member.
    """
    if target not in chain.targets():
        raise ValueError(f"target {target} is not a member of chain {chain.id}")
    if chain.targets(Public.SERVING):
        raise ValueError(f"chain {chain.id} serves: there is nothing to restart")
    others = [Member(m.target, Public.OFFLINE) for m in chain.members if m.target != target]
    return Chain(chain.id, chain.version + 1, (Member(target, Public.LASTSRV), *others))


def has_served(chain: Chain) -> bool:
    """Returns whether the chain serves, or is stopped and served before.

    A stopped chain served before if a LASTSRV member has a recorded store, and no member is
    RECOVERING.
    """
    if chain.targets(Public.SERVING):
        return True
    stores = [member.store for member in chain.members if member.state is Public.LASTSRV]
    return any(stores) and not chain.targets(Public.RECOVERING)


def _rank(member: Member) -> int:
    return member.state


def _serves(members: Sequence[Member]) -> bool:
    return any(member.state is Public.SERVING for member in members)


def _leave(chain: Chain, locals_: Mapping[int, Local]) -> list[Member]:
    """Applies rule 1: members that no longer hold their active state leave it.

    A SERVING or RECOVERING member becomes LASTSRV; rule 5 may make it WAITING. A SYNCING member
    becomes WAITING.
    """
    after = []
    for member in chain.members:
        if member.state in ACTIVE and not holds_state(member, locals_):
            if member.state is Public.SYNCING:
                member = Member(member.target, Public.WAITING)
            else:
                member = Member(member.target, Public.LASTSRV, store=member.store)
        after.append(member)
    return after


def _promote(member: Member, version: int, locals_: Mapping[int, Local]) -> Member:
    """Applies rule 2: a member that reports UPTODATE at the published version becomes SERVING."""
    if member.state not in (Public.RECOVERING, Public.SYNCING):
        return member
    local = locals_[member.target]
    if local.state is not LocalState.UPTODATE or local.version != version:
        return member
    return Member(member.target, Public.SERVING, member.incarnation, local.store)


def _retire(member: Member) -> Member:
    """Applies rule 5: once a member serves, no member stays LASTSRV or RECOVERING."""
    if member.state in (Public.LASTSRV, Public.RECOVERING):
        return Member(member.target, Public.WAITING)
    return member


def _recover(members: list[Member], locals_: Mapping[int, Local], proceed: bool) -> list[Member]:
    """Applies rules 3 and 4 to a chain without a SERVING member."""

    def held(member: Member) -> bool:
        """Returns False if a member is known to have lost the store with which it served."""
        local = locals_.get(member.target)
        return local is None or member.store in (0, local.store)

    def usable(member: Member) -> bool:
        local = locals_.get(member.target)
        return held(member) and local is not None and local.state is not LocalState.FAULTY

    def keep(wanted: Callable[[Member], bool]) -> None:
        """Makes unwanted holders WAITING, unless that would leave no holder."""
        if not any(wanted(member) for member in holders()):
            return
        for at, member in enumerate(members):
            if member.state in HOLDERS and not wanted(member):
                members[at] = Member(member.target, Public.WAITING)

    def holders() -> list[Member]:
        return [member for member in members if member.state in HOLDERS]

    members = [
        Member(m.target, Public.WAITING) if m.state is Public.SYNCING else m for m in members
    ]
    keep(held)
    if proceed:
        keep(usable)
    last = holders()
    if any(m.state is Public.RECOVERING for m in last) or not all(usable(m) for m in last):
        return members
    state = Public.SERVING if len(last) == 1 else Public.RECOVERING
    local = locals_[last[0].target]
    begun = Member(last[0].target, state, local.incarnation, local.store)
    return [begun if member is last[0] else member for member in members]


def _aliveness(member: Member, locals_: Mapping[int, Local]) -> Member:
    """Applies rule 6: a member in no other state is WAITING if it is alive, otherwise OFFLINE."""
    if member.state not in (Public.WAITING, Public.OFFLINE):
        return member
    state = Public.WAITING if member.target in locals_ else Public.OFFLINE
    return member if member.state is state else Member(member.target, state)


def _start_sync(members: list[Member], locals_: Mapping[int, Local]) -> list[Member]:
    """Applies rule 7: if no member is SYNCING, the first usable WAITING member becomes SYNCING."""
    if any(member.state is Public.SYNCING for member in members):
        return members
    for at, member in enumerate(members):
        if member.state is not Public.WAITING or member.target not in locals_:
            continue
        local = locals_[member.target]
        if local.state is LocalState.FAULTY:
            continue
        syncing = Member(member.target, Public.SYNCING, local.incarnation)
        return [*members[:at], syncing, *members[at + 1 :]]
    return members
