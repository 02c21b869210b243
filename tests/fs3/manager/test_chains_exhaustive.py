"""Every reachable chain of up to four targets under every report of them: invariants and liveness.

A chain is looked at without names and numbers: the rules ask only for order and equality. With each
target goes a ghost: whether it holds all that was acknowledged, in the worst case, where every version
of the chain with a serving member acknowledges a write.
"""

import itertools
from collections.abc import Iterator

import pytest

from fireflyer.fs3.manager.chains import Chain, Local, LocalState, Member, Public, next_chain

ONLINE, UPTODATE, FAULTY = LocalState
VERSION, OWN, OTHER = 5, 1, 2

State = tuple[tuple[Public, bool, bool], ...]
"""A member each, in order: its state, whether any store will do, whether it holds everything."""


def build(state: State) -> Chain:
    return Chain(
        1,
        VERSION,
        tuple(
            Member(
                target,
                public,
                OWN if public in (Public.SERVING, Public.RECOVERING, Public.SYNCING) else 0,
                OWN
                if public in (Public.SERVING, Public.RECOVERING, Public.LASTSRV) and not any_store
                else 0,
            )
            for target, (public, any_store, _) in enumerate(state)
        ),
    )


def reports(stores: bool) -> list[Local | None]:
    """All that a target can say: dead, or its process, state and store are the old ones or not."""
    return [
        None,
        *(
            Local(incarnation, said, VERSION if said is UPTODATE else 0, store)
            for said in LocalState
            for incarnation in (OWN, OTHER)
            for store in ((OWN, OTHER) if stores else (OWN,))
            if incarnation == OTHER or store == OWN  # another store needs another process
            if not (said is UPTODATE and incarnation == OTHER)  # it has not been asked anything yet
            if not (said is FAULTY and incarnation == OTHER and store == OWN)  # leaves either way
        ),
    ]


def full_after(state: State, locals_: dict[int, Local], after: Chain) -> list[bool]:
    """The ghosts, in the order of `after`: before its version acknowledges anything."""
    full = []
    for member in after.members:
        target = member.target
        public, any_store, held = state[target]
        local = locals_.get(target)
        if local and local.store == OTHER and not any_store and member.state is not Public.LASTSRV:
            held = False  # while LASTSRV, the ghost is about the store that it is waited for with
        finished = local and local.state is UPTODATE and local.incarnation == OWN
        if finished and public in (Public.SYNCING, Public.RECOVERING):
            held = True
        full.append(held)
    return full


def settle(after: Chain, full: list[bool]) -> State:
    """The state once the version has acknowledged a write, where it can."""
    writes = any(member.state is Public.SERVING for member in after.members)
    return tuple(
        (
            member.state,
            member.state is Public.LASTSRV and member.store == 0,
            member.state is Public.SERVING if writes else held,
        )
        for member, held in zip(after.members, full, strict=True)
    )


def check(before: Chain, after: Chain, full: list[bool]) -> None:
    count = {state: len(after.targets(state)) for state in Public}
    assert sorted(after.targets()) == sorted(before.targets())
    assert [m.state for m in after.members] == sorted(m.state for m in after.members)
    assert count[Public.SYNCING] <= 1
    assert count[Public.RECOVERING] <= 1
    holders = count[Public.LASTSRV] + count[Public.RECOVERING]
    assert bool(count[Public.SERVING]) != bool(holders)
    assert count[Public.SERVING] or not count[Public.SYNCING]
    assert after.version == before.version + (after.members != before.members)
    for member, held in zip(after.members, full, strict=True):
        if member.state is Public.SERVING:
            assert held, f"{before} -> {after}: serves without all that was acknowledged"


def explore(targets: int, stores: bool) -> set[State]:
    """All reachable states; every step from each of them is checked."""
    first: State = ((Public.LASTSRV, True, True),) * targets
    seen, todo = {first}, [first]
    said = reports(stores)
    while todo:
        state = todo.pop()
        before = build(state)
        for choice in itertools.product(said, repeat=targets):
            locals_ = {target: local for target, local in enumerate(choice) if local is not None}
            for proceed in (False, True):
                after = next_chain(before, locals_, proceed)
                full = full_after(state, locals_, after)
                check(before, after, full)
                following = settle(after, full)
                if following not in seen:
                    seen.add(following)
                    todo.append(following)
    return seen


def returns(state: State) -> Iterator[list[int]]:
    """Who comes back with which store: all that leave a witness where there is one."""
    yield [OWN] * len(state)
    if any(public is Public.SERVING for public, _, _ in state):
        yield [OTHER if public > Public.SYNCING else OWN for public, _, _ in state]


def heals(state: State, stores: list[int]) -> bool:
    """All alive under new processes and doing what they are asked: do all serve in the end?"""
    chain, saying = build(state), {t: Local(OTHER, store=stores[t]) for t in range(len(state))}
    for target, (public, _, _) in enumerate(state):
        if public in (Public.SERVING, Public.RECOVERING, Public.SYNCING):
            saying[target] = Local(OWN, store=OWN)
    for _ in range(4 * len(state) + 4):
        if len(chain.targets(Public.SERVING)) == len(state):
            return True
        for member in chain.members:
            local = saying[member.target]
            if member.state in (Public.RECOVERING, Public.SYNCING):
                assert member.incarnation == local.incarnation
                saying[member.target] = Local(
                    local.incarnation, UPTODATE, chain.version, local.store
                )
        chain = next_chain(chain, saying)
    return False


@pytest.mark.sample(1)
@pytest.mark.parametrize(("targets", "stores"), [(1, True), (2, True), (3, True), (4, False)])
def test_every_step_keeps_the_invariants_and_every_chain_heals(targets: int, stores: bool) -> None:
    states = explore(targets, stores)
    assert {public for state in states for public, _, _ in state} >= {
        *((Public.SERVING, Public.LASTSRV) if targets == 1 else Public)
    }
    for state in states:
        for kept in returns(state):
            assert heals(state, kept), f"{state} with the stores {kept} never serves whole"
