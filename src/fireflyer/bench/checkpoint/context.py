"""Shared state, folders and rounds of all groups of the checkpoint benchmark."""

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from fireflyer.bench.checkpoint import state as states
from fireflyer.bench.checkpoint.state import State
from fireflyer.bench.harness.interleaving import interleaved
from fireflyer.bench.harness.options import size_text
from fireflyer.bench.harness.report import Row

EVERY_S = 30.0

Say = Callable[[str], None]
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Options of one run of the benchmark.

    Attributes:
        size: bytes of the state.
        work: folders for the saves; files written there are removed.
        only: groups to run, from GROUPS.
        every_s: seconds between the saves of the training group.
    """

    size: int
    work: tuple[Path, ...]
    only: tuple[str, ...]
    rounds: int
    every_s: float = EVERY_S


@dataclass(frozen=True)
class Place:
    """Folder with the kind of its storage."""

    folder: Path
    in_memory: bool
    """True for tmpfs, which has no cache to drop and needs no O_DIRECT."""

    @classmethod
    def of(cls, work: Path) -> "Place":
        """Creates the folder and returns its place."""
        work.mkdir(parents=True, exist_ok=True)
        folder = work.resolve()
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
        above = [(len(at), kind) for at, kind in mounts if folder.is_relative_to(at)]
        return cls(folder, max(above)[1] == "tmpfs")

    def __str__(self) -> str:
        return "tmpfs" if self.in_memory else "disk"


class Setting:
    """Environment of a run: folders, state and rounds."""

    def __init__(self, spec: Spec, say: Say) -> None:
        self.spec, self.say = spec, say
        self.places = [Place.of(work) for work in spec.work]
        self.disk = min(self.places, key=lambda place: place.in_memory)
        """First place on a disk; if there is none, the first place."""
        self.memory = max(self.places, key=lambda place: place.in_memory)
        """First place in memory; if there is none, the first place."""
        self._numbers = itertools.count()

    @cached_property
    def state(self) -> State:
        """Returns the state, created at the first use. A group of cases may change its values."""
        self.say(f"a state of {size_text(self.spec.size)}")
        return states.gpt_state(self.spec.size)

    @property
    def bytes(self) -> int:
        return states.bytes_of(self.state)

    def case(self, what: str, place: Place) -> str:
        case = f"{what}, {size_text(self.spec.size)}, {place}"
        self.say(case)
        return case

    def new_folder(self, place: Place) -> Path:
        """Returns an unused path below the place."""
        return place.folder / f"{os.getpid()}-{next(self._numbers)}"

    def rounds(self, candidates: dict[str, Callable[[], _T]]) -> dict[str, list[_T]]:
        """Runs `interleaved` with this run's number of rounds."""
        return interleaved(candidates, self.spec.rounds)


def at_most(case: str, unit: str, values: Sequence[float], most: float) -> Row:
    """Returns a row whose value must be at most `most`."""
    return Row.of_times(case, unit, values, "asked: at most", [most], goal=1.0)
