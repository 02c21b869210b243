"""Check that all ranks create their groups in the same order.

torch numbers groups in the order of their creation on each rank. If ranks create groups in
different orders, one number stands for different groups. Ranks of these groups would meet and
reduce each other's values. Two things identify a group: its members, and the call that creates it.

A *call* is a position in the program: the lines of all functions on the stack. The first rank that
makes a call publishes the number of its new group. If the same call yields another number on
another rank, the orders differ. Calls at different positions prove nothing, because ranks may run
different branches.
"""

import hashlib
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Protocol

from fireflyer.errors import ConfigError


class OrderStore(Protocol):
    """Methods that the check needs of a store; `torch.distributed` stores have them."""

    def set(self, key: str, value: str) -> object: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...

    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


_BROKEN = "fireflyer: order of groups"
_SAME = "call new_group for the same groups in the same order on all ranks"


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


class CallPlaces:
    """Names this rank's calls: by position in the program, and number of earlier calls there.

    The creation of a default group restarts the count; see `forget`.
    """

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def forget(self) -> None:
        self._seen.clear()

    def next(self, members: Sequence[int]) -> tuple[str, str]:
        """Returns the present call's key for a group of `members`, and its script line for errors."""
        frames = list(_stack(sys._getframe(1)))
        lines = [f"{frame.f_code.co_filename}:{frame.f_lineno}" for frame in frames]
        named = [f.f_locals.get("group_desc") for f in frames if f.f_code.co_name == "new_group"]
        text = "\n".join([str(list(members)), str(named), *lines])
        place = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
        self._seen[place] += 1
        own = (frame for frame in frames if not _is_library(frame))
        script = next(own, frames[-1])
        line = f"{script.f_code.co_filename}:{script.f_lineno}"
        return f"call {place} {self._seen[place]}", line


_LIBRARIES = ("torch", "fireflyer")


def _is_library(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _LIBRARIES


places = CallPlaces()
"""Calls of this process since the creation of its default group."""


class CreationOrder:
    """One rank's creation of a group.

    Args:
        store: store of the ranks that create a group under this name.
        job: store of all ranks. A rank that finds a difference reports it here, so that the report
            also reaches ranks that wait for a group of another name.
        name: torch's name of the group, which is its number.
        rank: this rank, in the default group.
        members: ranks of the group, in the default group.
    """

    def __init__(
        self, store: OrderStore, job: OrderStore, name: str, rank: int, members: Sequence[int]
    ) -> None:
        self._job = job
        mine = f"rank {rank} creates it of ranks {list(members)}"
        _, _, seen = store.compare_set("order", "", mine).decode().partition(" of ranks ")
        first = store.get("order").decode()
        if seen != str(list(members)):
            self._refuse(f"of group {name}, {first}, but {mine}")
        self._compare_calls(name, rank, members)
        self.check()

    def _compare_calls(self, name: str, rank: int, members: Sequence[int]) -> None:
        call, line = places.next(members)
        key = f"fireflyer: {call}"
        theirs = self._job.compare_set(key, "", f"group {name} on rank {rank}").decode()
        group, _, other = theirs.partition(" on ")
        if group != f"group {name}":
            self._refuse(
                f"the group of ranks {list(members)} that {line} creates is {group} on {other}, but "
                f"group {name} on rank {rank}"
            )

    def _refuse(self, difference: str) -> None:
        self._job.set(
            _BROKEN, f"the ranks create groups in different orders: {difference}; {_SAME}"
        )

    def check(self) -> None:
        """Raises ConfigError if the ranks' orders differ. Called repeatedly while the rank
        waits."""
        if self._job.check([_BROKEN]):
            raise ConfigError(self._job.get(_BROKEN).decode())
