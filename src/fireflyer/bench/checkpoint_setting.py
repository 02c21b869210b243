"""What all groups of the checkpoint benchmark share: the state, the folders, and the rounds."""

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from fireflyer.bench import checkpoint_state as states
from fireflyer.bench.checkpoint_state import State
from fireflyer.bench.options import size_text
from fireflyer.bench.report import Row
from fireflyer.bench.turns import interleaved

EVERY_S = 30.0

Say = Callable[[str], None]
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One run of the benchmark.

    Attributes:
        size: bytes of the state.
        work: folders to save in; what is written there is removed.
        only: groups to run, of GROUPS.
        every_s: of the training group: seconds from save to save.
    """

    size: int
    work: tuple[Path, ...]
    only: tuple[str, ...]
    rounds: int
    every_s: float = EVERY_S


@dataclass(frozen=True)
class Place:
    """A folder and the storage that it is on."""

    folder: Path
    in_memory: bool
    """Whether that is tmpfs, which has no cache to drop and needs no O_DIRECT."""

    @classmethod
    def of(cls, work: Path) -> "Place":
        """Makes the folder."""
        work.mkdir(parents=True, exist_ok=True)
        folder = work.resolve()
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
        above = [(len(at), kind) for at, kind in mounts if folder.is_relative_to(at)]
        return cls(folder, max(above)[1] == "tmpfs")

    def __str__(self) -> str:
        return "tmpfs" if self.in_memory else "disk"


class Setting:
    """Where and with what a run measures."""

    def __init__(self, spec: Spec, say: Say) -> None:
        self.spec, self.say = spec, say
        self.places = [Place.of(work) for work in spec.work]
        self.disk = min(self.places, key=lambda place: place.in_memory)
        """The first place on a disk, or the first one."""
        self.memory = max(self.places, key=lambda place: place.in_memory)
        """The first place in memory, or the first one."""
        self._numbers = itertools.count()

    @cached_property
    def state(self) -> State:
        """Made when first asked for; groups may leave other values in it."""
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
        """A path below the place at which nothing is yet."""
        return place.folder / f"{os.getpid()}-{next(self._numbers)}"

    def rounds(self, candidates: dict[str, Callable[[], _T]]) -> dict[str, list[_T]]:
        """See `interleaved`."""
        return interleaved(candidates, self.spec.rounds)


def at_most(case: str, unit: str, values: Sequence[float], most: float) -> Row:
    """A row of what must not be more than `most`."""
    return Row.of_times(case, unit, values, "asked: at most", [most], goal=1.0)
