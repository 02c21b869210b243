"""Reader of the metrics lines of `gpt.py` while `gpt.py` writes them."""

from pathlib import Path

import msgspec


class MetricsRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Rank 0's record of one optimizer step."""

    step: int
    """Step number, starting at 1; after a restart, at the checkpoint's step + 1."""
    loss: float
    """Mean of all ranks' losses before the step's update, in nats per token."""
    tokens: int
    """Number of tokens in this step, over all ranks."""
    step_s: float
    comm_s: float
    """Part of step_s during which reductions blocked rank 0."""
    monotonic: float
    """CLOCK_MONOTONIC at the end of the step."""
    wall: float
    trained_s: float
    """Training time so far, without the time undone by a kill."""
    attempt: int
    checkpoint_step: int | None
    """Step of the newest checkpoint."""
    checkpoint_stall_s: float | None
    """Time for which a save blocked this step; None if the step did not save."""


_decoder = msgspec.json.Decoder(MetricsRecord)


class Tail:
    """Reader of the complete lines of a growing file; the file may not exist yet.

    Lines that a killed writer left unfinished, and lines that are not metrics lines, are skipped
    and counted in `damaged`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""
        self.damaged = 0

    def read(self) -> list[MetricsRecord]:
        """Returns the lines that became complete since the last call."""
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
