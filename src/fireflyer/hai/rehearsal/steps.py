"""Parser of the steps that a script prints: any line of rank 0's output with "step 40", "step=40",
"step: 40" or `"step": 40`. If a line also mentions resuming or loading, its step is the step of the
loaded checkpoint. Pure."""

import re

import msgspec

_STEP = re.compile(rb"\bsteps?\b[\"']?\s*[:=#]?\s*([0-9]{1,15})\b", re.IGNORECASE)
_RESUMED = re.compile(rb"\b(resum|restor|load|continu)", re.IGNORECASE)


class AttemptSteps(msgspec.Struct, kw_only=True):
    """Steps that one attempt has printed."""

    first: int | None = None
    last: int | None = None
    resumed_from: int | None = None
    """Step of the loaded checkpoint, if a line before the first step names it."""


class StepReader:
    """Incremental parser of one attempt's output, in pieces of any size."""

    def __init__(self) -> None:
        self.attempt_steps = AttemptSteps()
        self._partial = b""

    def feed(self, data: bytes) -> None:
        *lines, self._partial = (self._partial + data).split(b"\n")
        self._partial = self._partial[-4096:]
        for line in lines:
            self._line(line)

    def _line(self, line: bytes) -> None:
        found = _STEP.search(line)
        if found is None:
            return
        step, attempt_steps = int(found[1]), self.attempt_steps
        if _RESUMED.search(line):
            if attempt_steps.first is None:
                attempt_steps.resumed_from = step
            return
        if attempt_steps.first is None:
            attempt_steps.first = step
        attempt_steps.last = step
