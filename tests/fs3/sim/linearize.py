"""Is there one order of overlapping operations that explains every answer?

The search of Wing and Gong with memoisation (Lowe): an operation may come next when no other operation
that is still to come had ended before it was called. Operations whose outcome nobody learned (`end`
infinite) may take effect at any time after their call, or never. Works on any model: a hashable state
and a pure step function.
"""

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

UNKNOWN = float("inf")  # the end of an operation whose outcome nobody learned


class Timed(Protocol):
    """What the search needs to know of an operation."""

    @property
    def call(self) -> float: ...

    @property
    def end(self) -> float: ...


State = TypeVar("State", bound=Hashable)
Op = TypeVar("Op", bound=Timed)


class Undecided(Exception):
    """The search was given up: the history is too long or too concurrent."""


@dataclass(frozen=True)
class Verdict(Generic[Op]):
    """`order` explains the history when `ok`; else it is the longest order that was found, and
    `stuck` holds the operations of which one had to come next and none could."""

    ok: bool
    order: tuple[Op, ...]
    stuck: tuple[Op, ...] = ()


class Frontier(Generic[Op]):
    """Which operations may come next, after a set of those that have their places (bit i: `ops[i]`).

    Known ones stand first in `ops`, by call, so that the search in them is short.
    """

    def __init__(
        self,
        operations: Sequence[Op],
        key: Callable[[Op], float],
        same: Callable[[Op], Hashable],
    ) -> None:
        by_call = sorted(operations, key=lambda op: op.call)
        self.ops = [op for op in by_call if op.end != UNKNOWN]
        self.known = len(self.ops)
        self.ops += [op for op in by_call if op.end == UNKNOWN]
        self._key = key
        self._same = same

    def candidates(self, placed: int) -> list[int]:
        """Those of known outcome by their keys, then the others: most of them changed nothing."""
        ops, known = self.ops, self.known
        first_end = UNKNOWN
        found = []
        i = (~placed & (placed + 1)).bit_length() - 1  # lowest clear bit
        while i < known and ops[i].call <= first_end:
            if not placed >> i & 1:
                found.append(i)
                first_end = min(first_end, ops[i].end)
            i += 1
        found = [i for i in found if ops[i].call <= first_end]
        found.sort(key=lambda i: self._key(ops[i]))
        tried = set()
        for i in range(known, len(ops)):
            if ops[i].call > first_end:
                break
            if not placed >> i & 1 and (effect := self._same(ops[i])) not in tried:
                tried.add(effect)
                found.append(i)
        return found


def _row(path: Sequence[int], known: int) -> int:
    """How many of unknown outcome the path ends with."""
    return next((n for n, i in enumerate(reversed(path)) if i < known), len(path))


def linearize(
    operations: Sequence[Op],
    initial: State,
    step: Callable[[State, Op], State | None],
    *,
    key: Callable[[Op], float] = lambda op: op.call,
    doomed: Callable[[State, Op], bool] = lambda state, op: False,
    same: Callable[[Op], Hashable] = id,
    limit: int = 2_000_000,
    in_a_row: int | None = None,
) -> Verdict[Op]:
    """Searches an order of `operations` in which `step` accepts each one.

    Args:
        step: the state after the operation, or None where its answer contradicts the state. For an operation
            of unknown outcome there is no answer to contradict.
        key: operations of small key are tried first; a good guess of the order makes the search linear.
        doomed: whether an operation, not placed yet, is impossible after this state and all that can follow.
        same: of equal keys are operations of unknown outcome that do the same, which are tried in one order.
        limit: of states visited.
        in_a_row: most operations of unknown outcome that are placed between two known ones. None: a few at
            first, then more: that few of them took effect is likely, and there are many orders of many.

    Raises:
        Undecided: after `limit` states.
    """
    if in_a_row is None:
        for few in (1, 2, 3, 4):
            with contextlib.suppress(Undecided):
                found = linearize(
                    operations, initial, step,
                    key=key, doomed=doomed, same=same, limit=limit // 10, in_a_row=few,
                )  # fmt: skip
                if found.ok:
                    return found
        in_a_row = len(operations)
    frontier = Frontier(operations, key, same)
    known, ops = frontier.known, frontier.ops
    everything = (1 << known) - 1
    if not known:
        return Verdict(True, ())
    seen: set[tuple[int, State]] = set()
    path: list[int] = []
    best: list[int] = []
    stack: list[tuple[int, State, Iterator[int]]] = [(0, initial, iter(frontier.candidates(0)))]
    while stack:
        placed, state, choices = stack[-1]
        row = _row(path, known)
        for i in choices:
            if i >= known and row >= in_a_row:
                continue
            after = step(state, ops[i])
            if after is None or (i >= known and after == state):
                continue
            place = (placed | 1 << i, after)
            if place in seen:
                continue
            if len(seen) >= limit:
                raise Undecided(f"{len(ops)} operations, {limit} states")
            seen.add(place)
            path.append(i)
            if place[0] & everything == everything:
                return Verdict(True, tuple(ops[j] for j in path))
            if len(path) > len(best):
                best = path.copy()
            following = frontier.candidates(place[0])
            # Far too many orders of unknown ones could be tried before a known one that they doom comes up.
            to_come = (j for j in (following if i < known else range(known)) if j < known)
            if any(not place[0] >> j & 1 and doomed(after, ops[j]) for j in to_come):
                path.pop()
                continue
            stack.append((place[0], after, iter(following)))
            break
        else:
            stack.pop()
            if path:
                path.pop()
    placed = sum(1 << i for i in best)
    return Verdict(
        False,
        tuple(ops[i] for i in best),
        tuple(ops[i] for i in frontier.candidates(placed) if ops[i].end != UNKNOWN),
    )
