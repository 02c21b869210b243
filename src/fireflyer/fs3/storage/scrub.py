"""Progress of a node's scrub, which survives restarts."""

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
    """Returns the seconds to wait before each step of a round that takes at most `scrub_s`.

    A round of a target has a step for each `STEP_CHUNKS` chunks, rounded up, and a step that finds
    the end.
    """
    steps = chunks / STEP_CHUNKS + 2 * max(1, targets)
    return min(scrub_s / steps, LONGEST_PAUSE_S)


class Place(msgspec.Struct):
    """Progress of the scrub in one target.

    Attributes:
        after: last chunk read (inode, index); BEGIN: none in this round.
        finished: time at which the last whole round ended, in s since 1970; 0: never.
    """

    after: tuple[int, int] = BEGIN
    finished: float = 0.0


class ScrubLog:
    """Progress of all targets, in a file. One thread writes; any thread may read.

    If the file cannot be read or written, the scrub starts a new round at the next start; nothing
    else is lost.
    """

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
                "cannot read %s, so the scrub starts from the beginning: %s", self._path, error
            )

    def place(self, slot: int) -> Place:
        return self._places.get(slot, Place())

    def note(self, slot: int, after: tuple[int, int]) -> None:
        """Records the last chunk that the scrub read; BEGIN: the round is complete."""
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
