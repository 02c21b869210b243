"""The lines that `gpt.py` writes, read while they are written."""

from pathlib import Path

import msgspec


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step as rank 0 saw it."""

    step: int
    """Counts from 1; after a restart from the checkpoint's step + 1."""
    loss: float
    """Mean over the ranks, nats a token, before the step."""
    tokens: int
    """Of this step, all ranks."""
    step_s: float
    comm_s: float
    """Part of step_s in which rank 0 was blocked by reductions."""
    monotonic: float
    """CLOCK_MONOTONIC at the end of the step."""
    wall: float
    trained_s: float
    """Training time so far, without what a kill undid."""
    attempt: int
    checkpoint_step: int | None
    """Step of the newest checkpoint."""
    checkpoint_stall_s: float | None
    """How long saving blocked this step; None when it did not save."""


_decoder = msgspec.json.Decoder(Line)


class Tail:
    """Reads the complete lines of a file that grows; the file may not exist yet.

    A line that a killed writer left unfinished, or that is not a metrics line, is counted in
    `damaged` and passed over.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""
        self.damaged = 0

    def read(self) -> list[Line]:
        """The lines that became complete since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *complete, self._rest = (self._rest + data).split(b"\n")
        lines = []
        for raw in complete:
            try:
                lines.append(_decoder.decode(raw))
            except (msgspec.MsgspecError, UnicodeDecodeError):
                self.damaged += 1
        return lines
