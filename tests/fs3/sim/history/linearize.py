"""Is there one order of overlapping operations that explains every answer?

The search of Wing and Gong with memoisation (Lowe): an operation may come next when no other operation
that is still to come had ended before it was called. Operations whose outcome nobody learned (`end`
infinite) may take effect at any time after their call, or never. Works on any model: a hashable state
and a pure step function.
"""

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
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


@dataclass
class Search(Generic[State, Op]):
    """Depth first, over (which are placed, the state after them); `path` is the order so far."""

    frontier: Frontier[Op]
    initial: State
    step: Callable[[State, Op], State | None]
    doomed: Callable[[State, Op], bool]

    def run(self, limit: int, in_a_row: int) -> Verdict[Op]:
        """With at most `in_a_row` operations of unknown outcome between two known ones.

        Raises:
            Undecided: after `limit` states.
        """
        frontier = self.frontier
        known, ops = frontier.known, frontier.ops
        everything = (1 << known) - 1
        if not known:
            return Verdict(True, ())
        seen: set[tuple[int, State]] = set()
        path: list[int] = []
        best: list[int] = []
        stack = [(0, self.initial, iter(frontier.candidates(0)))]
        while stack:
            found = self._next(*stack[-1], path, in_a_row, seen)
            if found is None:
                stack.pop()
                if path:
                    path.pop()
                continue
            i, placed, after = found
            if len(seen) >= limit:
                raise Undecided(f"{len(ops)} operations, {limit} states")
            seen.add((placed, after))
            path.append(i)
            if placed & everything == everything:
                return Verdict(True, tuple(ops[j] for j in path))
            if len(path) > len(best):
                best = path.copy()
            following = frontier.candidates(placed)
            if self._hopeless(placed, after, following if i < known else range(known)):
                path.pop()
            else:
                stack.append((placed, after, iter(following)))
        return self._stuck(best)

    def _next(
        self,
        placed: int,
        state: State,
        choices: Iterator[int],
        path: list[int],
        in_a_row: int,
        seen: set[tuple[int, State]],
    ) -> tuple[int, int, State] | None:
        """An operation that can come next, what is placed then, and the state after it."""
        known, ops = self.frontier.known, self.frontier.ops
        row = next((n for n, i in enumerate(reversed(path)) if i < known), len(path))
        for i in choices:
            if i >= known and row >= in_a_row:
                continue
            after = self.step(state, ops[i])
            if after is None or (i >= known and after == state):
                continue
            if (placed | 1 << i, after) not in seen:
                return i, placed | 1 << i, after
        return None

    def _hopeless(self, placed: int, state: State, following: Iterable[int]) -> bool:
        """Whether a known operation is doomed: far too many orders of unknown ones could be tried before
        its turn comes."""
        to_come = (j for j in following if j < self.frontier.known and not placed >> j & 1)
        return any(self.doomed(state, self.frontier.ops[j]) for j in to_come)

    def _stuck(self, best: list[int]) -> Verdict[Op]:
        ops = self.frontier.ops
        after = self.frontier.candidates(sum(1 << i for i in best))
        stuck = tuple(ops[i] for i in after if i < self.frontier.known)
        return Verdict(False, tuple(ops[i] for i in best), stuck)


def linearize(
    operations: Sequence[Op],
    initial: State,
    step: Callable[[State, Op], State | None],
    *,
    key: Callable[[Op], float] = lambda op: op.call,
    doomed: Callable[[State, Op], bool] = lambda state, op: False,
    same: Callable[[Op], Hashable] = id,
    limit: int = 2_000_000,
) -> Verdict[Op]:
    """Searches an order of `operations` in which `step` accepts each one.

    That few of those of unknown outcome took effect is likely, and there are many orders of many: so few
    in a row are tried first.

    Args:
        step: the state after the operation, or None where its answer contradicts the state. For an operation
            of unknown outcome there is no answer to contradict.
        key: operations of small key are tried first; a good guess of the order makes the search linear.
        doomed: whether an operation, not placed yet, is impossible after this state and all that can follow.
        same: of equal keys are operations of unknown outcome that do the same, which are tried in one order.
        limit: of states visited.

    Raises:
        Undecided: after `limit` states.
    """
    search = Search(Frontier(operations, key, same), initial, step, doomed)
    for few in (1, 2, 3, 4):
        with contextlib.suppress(Undecided):
            found = search.run(limit // 10, few)
            if found.ok:
                return found
    return search.run(limit, len(operations))
