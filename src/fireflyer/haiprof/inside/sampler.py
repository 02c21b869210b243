"""Samples of the Python stacks of all threads, taken inside the process.

A sample waits for the interpreter lock. A sample that native code delayed gets the weight of all
missed samples.
"""

import dis
import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import NamedTuple

MOST_STACKS = 20_000
MOST_FRAMES = 200


class NewStack(NamedTuple):
    """A stack that was seen for the first time."""

    number: int
    frames: list[tuple[str, str, int]]
    """Function, file, line; outermost first."""
    waits_for_lock: bool


class StackSampler:
    """Samples of one session; used by the agent's thread alone."""

    def __init__(self, period_ns: int) -> None:
        self.period_ns = period_ns
        self._numbers: dict[tuple[int, ...], int] = {}
        # The code objects stay alive here, so that their ids stay unique.
        self._codes: dict[int, CodeType] = {}
        self._named: set[int] = set()
        self._own = threading.get_ident()

    def take(self) -> Iterator[tuple[int, int, NewStack | None]]:
        """Yields, for each other thread: the thread, its stack's number, and the stack if it is
        new."""
        for thread, frame in sys._current_frames().items():
            if thread == self._own:
                continue
            key: list[int] = [frame.f_lasti]
            at: FrameType | None = frame
            while at is not None and len(key) < MOST_FRAMES:
                key.append(id(at.f_code))
                at = at.f_back
            found = tuple(key)
            number = self._numbers.get(found)
            if number is not None:
                yield thread, number, None
            elif len(self._numbers) < MOST_STACKS:
                number = self._numbers[found] = len(self._numbers)
                yield thread, number, self._describe(number, frame)

    def new_names(self) -> dict[int, str]:
        """Returns the names of threads that no earlier call returned."""
        names = {
            t.ident: t.name
            for t in list(threading._active.values())  # type: ignore[attr-defined]
            if t.ident is not None and t.ident not in self._named
        }
        self._named.update(names)
        return names

    def _describe(self, number: int, leaf: FrameType) -> NewStack:
        frames: list[tuple[str, str, int]] = []
        at: FrameType | None = leaf
        while at is not None and len(frames) < MOST_FRAMES:
            code = at.f_code
            self._codes[id(code)] = code
            line = at.f_lineno if at is leaf else code.co_firstlineno
            frames.append((code.co_qualname, code.co_filename, line or code.co_firstlineno))
            at = at.f_back
        frames.reverse()
        return NewStack(number, frames, acquires_lock(leaf.f_code, leaf.f_lasti))


def acquires_lock(code: CodeType, offset: int) -> bool:
    """Returns whether the instruction at `offset` acquires a lock: `lock.acquire()`, `with lock:`.

    A `with` in the innermost frame enters a native object such as a lock, because the entry into a
    context manager written in Python has a frame of its own.
    """
    operation = dis.opname[code.co_code[offset]] if offset >= 0 else ""
    if operation != "BEFORE_WITH" and not (
        operation in ("CALL", "CALL_KW") and "acquire" in code.co_names
    ):
        return False  # returns early, because listing the instructions takes milliseconds
    before = [i for i in dis.get_instructions(code) if i.offset <= offset and i.opname != "CACHE"]
    if not before or before[-1].offset != offset:
        return False
    if before[-1].opname == "BEFORE_WITH":
        return True
    if before[-1].opname not in ("CALL", "CALL_KW"):
        return False
    for instruction in reversed(before[-12:-1]):
        if instruction.opname in ("LOAD_METHOD", "LOAD_ATTR"):
            return bool(instruction.argval == "acquire")
    return False
