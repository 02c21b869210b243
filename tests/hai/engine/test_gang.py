"""The outcome of a gang from its records, in every order in which they may come."""

from itertools import permutations
from pathlib import Path

import pytest

from fireflyer.hai.engines.gang import GangState, Now
from fireflyer.hai.model.engine import Gang, GangEnded, RankStarted
from fireflyer.hai.supervisor.messages import Cause, PartEnded, Record

GANG = Gang(
    task="t1",
    attempt=1,
    script="/s.py",
    args=(),
    cwd="/",
    env={},
    nodes=("n0", "n1", "n2"),
    ranks_per_node=1,
    start="exec",
    secret="",
    directory=Path("/t1/1"),
)


def part(
    node: str, cause: Cause = "finished", *, reason: str = "", told: bool = False, at: int = 10
) -> Record:
    event = PartEnded(
        node=node,
        cause=cause,
        reason=reason,
        told=told,
        highest=0,
        failed_ns=at if reason else 0,
        monotonic_ns=at,
        wall=float(at),
    )
    return Record(attempt=1, seq=2, event=event)


def started(node: str) -> Record:
    event = RankStarted(
        task="t1", attempt=1, rank=int(node[1]), node=node, pid=7, monotonic_ns=1, wall=1.0
    )
    return Record(attempt=1, seq=1, event=event)


def launched() -> GangState:
    state = GangState(GANG)
    for node in GANG.nodes:
        state.opened(node)
    state.sealed(Now(5, 5.0))
    return state


def name(record: Record) -> str:
    assert isinstance(record.event, PartEnded)
    return record.event.node


CASES: list[tuple[list[Record | str], str, str]] = [
    ([part("n0"), part("n1"), part("n2")], "finished", "every rank returned 0"),
    (
        [part("n0", "aborted"), part("n1", "failed", reason="boom"), part("n2", "aborted")],
        "failed",
        "boom",
    ),
    (
        [
            part("n0", "failed", reason="later", at=30),
            part("n1", "failed", reason="first", at=20),
            part("n2"),
        ],
        "failed",
        "first",
    ),
    (["n0", part("n1", "failed", reason="boom"), part("n2", "aborted")], "lost", "n0 died"),
    (["n0", part("n1", "stopped"), part("n2", "suspended")], "lost", "n0 died"),
    (["n0", "n1", "n2"], "lost", "n0 died; n1 died; n2 died"),
    ([part("n0", "stopped"), part("n1", "suspended"), part("n2")], "stopped", ""),
    ([part("n0", "suspended"), part("n1"), part("n2")], "suspended", ""),
    ([part("n0", told=True), part("n1"), part("n2")], "suspended", ""),
    (
        [part("n0", "suspended", reason="boom"), part("n1", "aborted"), part("n2", told=True)],
        "suspended",
        "boom",
    ),
    (
        [part("n0", "aborted"), part("n1", "aborted"), part("n2")],
        "failed",
        "replaced by a newer attempt",
    ),
]


@pytest.mark.parametrize(("steps", "outcome", "reason"), CASES)
def test_outcome_does_not_depend_on_the_order(
    steps: list[Record | str], outcome: str, reason: str
) -> None:
    for order in permutations(steps):
        state = launched()
        for index, step in enumerate(order):
            assert state.ended is None
            if isinstance(step, str):
                state.lost(step, f"{step} died", Now(50 + index, 0.0))
            else:
                state.record(step, name(step))
                state.record(step, name(step))  # told twice, counted once
        (ended,) = state.take()
        assert isinstance(ended, GangEnded)
        assert ended.outcome == outcome
        assert sorted(ended.reason.split("; ")) == sorted(reason.split("; "))
        assert state.take() == []


def test_the_end_waits_for_the_launch_to_be_over() -> None:
    state = GangState(GANG)
    state.opened("n0")
    state.record(started("n0"), "n0")
    state.record(part("n0", "failed", reason="boom"), "n0")
    assert state.aborting
    assert [type(event) for event in state.take()] == [RankStarted]
    state.sealed(Now(99, 99.0))
    (ended,) = state.take()
    assert isinstance(ended, GangEnded)
    assert (ended.outcome, ended.reason, ended.monotonic_ns) == ("failed", "boom", 10)


def test_a_refused_launch_without_parts_ends_at_once() -> None:
    state = GangState(GANG)
    state.refuse("cannot start: no space")
    state.sealed(Now(7, 7.0))
    (ended,) = state.take()
    assert isinstance(ended, GangEnded)
    assert (ended.outcome, ended.reason) == ("failed", "cannot start: no space")
    assert ended.monotonic_ns == 7


def test_failure_and_loss_ask_for_an_abort_and_an_end_in_peace_does_not() -> None:
    for record in (part("n0"), part("n0", "stopped"), part("n0", "suspended")):
        state = launched()
        state.record(record, "n0")
        assert not state.aborting
        assert state.open == {"n1", "n2"}
    state = launched()
    state.record(part("n0", "suspended", reason="crashed while leaving"), "n0")
    assert state.aborting
    state = launched()
    state.lost("n0", "n0 died", Now(1, 1.0))
    assert state.aborting
