"""Memory shared by the benchmark and the profiled script: one command, and the times of steps."""

import mmap
from array import array
from pathlib import Path

PLAIN, TORCH, TORCH_STACKS = range(3)
"""Commands: train; record steps with torch.profiler; record also the operators' Python stacks."""

MOST_STEPS = 1 << 18
_COMMAND, _COUNT, _HEAD, _FIELDS = 0, 1, 2, 3


class Board:
    """Commands to the script, and the times of each step, all in nanoseconds.

    The times are the monotonic clock and the CPU times of the process and of the training thread.
    The script writes steps; the benchmark writes commands.

    Args:
        path: file of the memory; the side that opens it first creates it.
    """

    def __init__(self, path: Path) -> None:
        size = 8 * (_HEAD + _FIELDS * MOST_STEPS)
        with open(path, "a+b") as file:
            file.truncate(size)
            self._words = memoryview(mmap.mmap(file.fileno(), size)).cast("q")

    @property
    def command(self) -> int:
        """Current command; the script resets it to PLAIN after execution."""
        return self._words[_COMMAND]

    @command.setter
    def command(self, value: int) -> None:
        self._words[_COMMAND] = value

    @property
    def count(self) -> int:
        """Returns the number of recorded steps."""
        return self._words[_COUNT]

    def add(self, moment: int, process: int, thread: int) -> None:
        """Adds a step that ended now; drops the step if the memory is full."""
        number = self.count
        if number < MOST_STEPS:
            at = _HEAD + _FIELDS * number
            self._words[at : at + _FIELDS] = array("q", (moment, process, thread))
            self._words[_COUNT] = number + 1

    def step(self, number: int) -> tuple[int, int, int]:
        """Returns a step: monotonic clock, CPU time of the process, CPU time of the training
        thread."""
        at = _HEAD + _FIELDS * number
        moment, process, thread = self._words[at : at + _FIELDS]
        return moment, process, thread
