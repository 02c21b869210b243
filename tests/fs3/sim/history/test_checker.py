"""The checker itself: histories that one chunk can and cannot have had."""

import itertools
import random

import pytest
from tests.fs3.sim.history.chunk_history import (
    ABSENT,
    ChunkOp,
    changed,
    check_chunk,
    explain,
    step,
    unwritten,
)
from tests.fs3.sim.history.linearize import UNKNOWN, Undecided, linearize


def write(
    call: float, end: float, data: bytes, version: int = 0, offset: int = 0, client: int = 1
) -> ChunkOp:
    return ChunkOp(client, "write", call, end, offset, len(data), data, version)


def read(call: float, end: float, data: bytes, version: int, client: int = 2) -> ChunkOp:
    return ChunkOp(client, "read", call, end, 0, 100, data, version, len(data))


def absent(call: float, end: float) -> ChunkOp:
    return ChunkOp(2, "read", call, end, 0, 100)


def remove(call: float, end: float, version: int = 0) -> ChunkOp:
    return ChunkOp(1, "remove", call, end, version=version)


GOOD = {
    "one after the other": [absent(0, 1), write(2, 3, b"a", 1), read(4, 5, b"a", 1)],
    "a read during a write sees the old": [
        write(0, 1, b"a", 1),
        write(2, 5, b"b", 2),
        read(3, 4, b"a", 1),
    ],
    "a read during a write sees the new": [
        write(0, 1, b"a", 1),
        write(2, 5, b"b", 2),
        read(3, 4, b"b", 2),
    ],
    "an unknown write that came late": [
        write(0, 1, b"a", 1),
        write(2, UNKNOWN, b"b"),
        read(3, 4, b"a", 1),
        read(5, 6, b"b", 2),
    ],
    "an unknown write that never came": [
        write(0, 1, b"a", 1),
        write(2, UNKNOWN, b"b"),
        read(3, 4, b"a", 1),
    ],
    "removed and written again": [
        write(0, 1, b"a", 1),
        remove(2, 3, 2),
        absent(4, 5),
        write(6, 7, b"c", 3),
        read(8, 9, b"c", 3),
    ],
    "a gap is zeros": [write(0, 1, b"a", 1, offset=2), read(2, 3, b"\0\0a", 1)],
    "truncate and extend": [
        write(0, 1, b"abcd", 1),
        ChunkOp(1, "truncate", 2, 3, length=2, version=2),
        ChunkOp(1, "extend", 4, 5, length=3, version=3),
        read(6, 7, b"ab\0", 3),
    ],
    "removing what is not there": [remove(0, 1), write(2, 3, b"a", 1), read(4, 5, b"a", 1)],
    "an unknown removal of nothing": [
        remove(0, UNKNOWN),
        write(2, 3, b"a", 1),
        read(4, 5, b"a", 1),
    ],
}

BAD = {
    "a lost write": [write(0, 1, b"a", 1), absent(2, 3)],
    "an old value after a new one": [
        write(0, 1, b"a", 1),
        write(2, 9, b"b", 2),
        read(3, 4, b"b", 2),
        read(5, 6, b"a", 1),
    ],
    "an unknown write undone after it was read": [
        write(0, 1, b"a", 1),
        write(2, UNKNOWN, b"b"),
        read(3, 4, b"b", 2),
        read(5, 6, b"a", 1),
    ],
    "a write that took effect twice": [
        write(0, 1, b"a", 1),
        write(2, 3, b"b", 2),
        read(4, 5, b"b", 2),
        read(6, 7, b"a", 3),
    ],
    "bytes of nobody": [write(0, 1, b"a", 1), read(2, 3, b"x", 1)],
    "two writes of one version": [write(0, 1, b"a", 1), write(2, 3, b"b", 1)],
    "a version with two contents": [
        write(0, 1, b"a", 1),
        write(2, UNKNOWN, b"b"),
        read(3, 4, b"b", 1),
    ],
    "a read before the write": [read(0, 1, b"a", 1), write(2, 3, b"a", 1)],
    "half of a write": [write(0, 1, b"abcd", 1), write(2, 9, b"wxyz", 2), read(3, 4, b"wxcd", 2)],
    "removed, yet there": [write(0, 1, b"a", 1), remove(2, 3, 2), read(4, 5, b"a", 1)],
    "a version used again after a removal": [
        write(0, 1, b"a", 1),
        remove(2, 3, 2),
        write(4, 5, b"b", 2),
    ],
    "a wrong length": [write(0, 1, b"ab", 1), ChunkOp(2, "read", 2, 3, 0, 2, b"ab", 1, 3)],
}


@pytest.mark.parametrize("name", GOOD)
def test_accepts_what_a_chunk_can_do(name: str) -> None:
    verdict = check_chunk(GOOD[name])
    assert verdict.ok, explain(verdict)


@pytest.mark.parametrize("name", BAD)
def test_refuses_what_no_chunk_can_do(name: str) -> None:
    verdict = check_chunk(BAD[name])
    assert not verdict.ok
    assert "can come next" in explain(verdict)


def random_history(rng: random.Random, operations: int) -> list[ChunkOp]:
    """Operations with a true moment each, inside their intervals; some outcomes are forgotten."""
    moments = sorted(rng.uniform(0, 10) for _ in range(operations))
    contents, version, history = ABSENT.contents, 0, []
    for moment in moments:
        kind = rng.choice(["write", "write", "read", "read", "truncate", "remove"])
        op = ChunkOp(0, kind, moment - rng.random(), moment + rng.random(), length=rng.randrange(5))
        if kind == "read":
            op.length = 100
            if contents is not None:
                op.data, op.version, op.whole = contents, version, len(contents)
        elif kind == "remove" and contents is None:
            pass
        else:
            if kind == "write":
                op.data = bytes([rng.randrange(256)]) * rng.randrange(1, 4)
                op.offset = rng.randrange(4)
            contents = changed(contents, op)
            version += 1
            op.version = version
            if rng.random() < 0.2:
                op.version, op.end = 0, UNKNOWN
        history.append(op)
    return history


def test_accepts_random_true_histories() -> None:
    rng = random.Random(1)
    for _ in range(300):
        history = random_history(rng, 30)
        verdict = check_chunk(history)
        assert verdict.ok, explain(verdict)


def test_agrees_with_trying_all_orders() -> None:
    """Answers are swapped at random; a search without frontier, memo or guesses says the same."""

    def brute(history: list[ChunkOp]) -> bool:
        known = [op for op in history if op.end != UNKNOWN]
        unknown = [op for op in history if op.end == UNKNOWN and op.kind != "read"]
        for count in range(len(unknown) + 1):
            for chosen in itertools.combinations(unknown, count):
                for order in itertools.permutations([*known, *chosen]):
                    if any(b.end < a.call for a, b in itertools.combinations(order, 2)):
                        continue
                    if accepts(order):
                        return True
        return False

    def accepts(order: tuple[ChunkOp, ...]) -> bool:
        state = ABSENT
        for op in order:
            after = step(state, op)
            if after is None:
                return False
            state = after
        return True

    rng = random.Random(2)
    verdicts = []
    for _ in range(300):
        history = random_history(rng, 5)
        reads = [op for op in history if op.kind == "read"]
        if len(reads) > 1 and rng.random() < 0.7:
            one, two = rng.sample(reads, 2)
            one.data, two.data = two.data, one.data
            one.version, two.version = two.version, one.version
            one.whole, two.whole = two.whole, one.whole
        verdict = check_chunk(history).ok
        assert verdict == brute(history), "\n".join(map(str, history))
        verdicts.append(verdict)
    assert set(verdicts) == {True, False}


def test_a_hopeless_search_is_given_up() -> None:
    history = [write(0, UNKNOWN, bytes([i])) for i in range(30)] + [read(1, 2, b"\xff", 9)]
    with pytest.raises(Undecided):
        linearize(
            history, 0, lambda state, op: None if op.kind == "read" else state + 1, limit=1000
        )


@pytest.mark.parametrize(
    ("operations", "bad"),
    [
        ([write(0, 1, b"aaaa"), write(2, 3, b"bb"), read(4, 5, b"bbaa", 3)], False),
        ([write(0, 1, b"aaaa"), write(2, 3, b"bb"), read(4, 5, b"aaaa", 3)], False),  # lost
        ([write(0, 1, b"aaaa"), write(2, 3, b"bb"), read(4, 5, b"baaa", 3)], True),  # torn
        ([write(0, 1, b"aaaa"), read(2, 3, b"aaax", 2)], True),  # of nobody
        ([write(4, 5, b"aaaa"), read(2, 3, b"aaaa", 2)], True),  # not written yet
        ([write(0, 1, b"a", offset=2), read(2, 3, b"\0\0a", 2)], False),
        (
            [
                write(0, 1, b"aaaa"),
                ChunkOp(1, "truncate", 2, 3, length=2),
                read(4, 5, b"aa\0\0", 3),
            ],
            False,
        ),
        ([write(0, 1, b"aaaa"), read(4, 5, b"aa\0\0", 3)], True),  # half of it lost
    ],
)
def test_bytes_that_nobody_wrote(operations: list[ChunkOp], bad: bool) -> None:
    assert (unwritten(operations) is not None) == bad
