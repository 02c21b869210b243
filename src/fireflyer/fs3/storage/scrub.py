"""What the scrub of a node remembers over restarts: how far it came, and when each target was last done."""

import time
from pathlib import Path

import msgspec

from fireflyer.fs3.config import replace
from fireflyer.log import get_logger

FILE = "scrub.json"
SAVE_EVERY_S = 60.0
BEGIN = (0, 0)
STEP_CHUNKS = 16
LONGEST_PAUSE_S = 60.0


def pause_before(scrub_s: float, chunks: int, targets: int) -> float:
    """Seconds to wait before each step of a round: all of them come to `scrub_s`, or less.

    A round of a target has a step for each `STEP_CHUNKS` of its chunks, of which the last may have fewer,
    and one that finds the end.
    """
    steps = chunks / STEP_CHUNKS + 2 * max(1, targets)
    return min(scrub_s / steps, LONGEST_PAUSE_S)


class Place(msgspec.Struct):
    """Of one target, by its slot.

    Attributes:
        after: the last chunk read (inode, index); BEGIN: none of this round.
        finished: s since 1970, when a whole round was done; 0: never.
    """

    after: tuple[int, int] = BEGIN
    finished: float = 0.0


class ScrubLog:
    """One thread writes, others may read. A file that cannot be read or written costs a round, no more."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._saved = time.monotonic()
        self._places: dict[int, Place] = {}
        try:
            self._places = msgspec.json.decode(self._path.read_bytes(), type=dict[int, Place])
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError) as error:
            get_logger("fs3").warning(
                "%s cannot be read, the scrub begins anew: %s", self._path, error
            )

    def place(self, slot: int) -> Place:
        return self._places.get(slot, Place())

    def note(self, slot: int, after: tuple[int, int]) -> None:
        """The scrub came to there; BEGIN: to the end."""
        finished = time.time() if after == BEGIN else self.place(slot).finished
        self._places[slot] = Place(after, finished)
        if after == BEGIN or time.monotonic() >= self._saved + SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        self._saved = time.monotonic()
        try:
            replace(self._path, msgspec.json.encode(self._places).decode())
        except OSError as error:
            get_logger("fs3").warning("%s cannot be written: %s", self._path, error)
