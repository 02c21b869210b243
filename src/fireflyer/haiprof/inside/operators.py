"""Operators of a few steps, through torch.profiler.

torch's observer belongs to the thread that starts it. So the training thread starts and stops the
observer, at the end of a step.
"""

import sys
import time
from collections.abc import Iterator
from typing import Any

from fireflyer.haiprof.messages import Operators

MOST_OPERATORS = 500_000
PART = 20_000
"""Maximum number of operators in a message."""


class OperatorRecorder:
    """Recording of `steps` steps, which begins at the end of the next step."""

    def __init__(self, steps: int) -> None:
        self._left = steps
        self._profiler: Any = None
        self._done: Any = None
        self.failure = ""

    def at_step(self) -> None:
        """Starts or stops the recording; called by the training thread."""
        if self._profiler is not None:
            self._left -= 1
            if self._left == 0:
                self.stop()
        elif self._left > 0:
            self._start()

    def _start(self) -> None:
        torch = sys.modules["torch"]
        if torch.autograd._profiler_enabled():
            self._left, self.failure = 0, "the script uses torch.profiler itself"
            return
        kinds = torch.profiler.ProfilerActivity
        activities = [kinds.CPU, *([kinds.CUDA] if torch.cuda.is_available() else [])]
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()

    def stop(self) -> None:
        """Stops a recording in progress."""
        profiler, self._profiler, self._left = self._profiler, None, 0
        if profiler is not None:
            profiler.stop()
            self._done = profiler

    @property
    def wanted(self) -> bool:
        """True until the recording has ended."""
        return self._left > 0

    @property
    def running(self) -> bool:
        """True while torch records."""
        return self._profiler is not None

    def taken(self) -> Iterator[Operators]:
        """Yields the result in parts, once, when it is complete."""
        profiler, self._done = self._done, None
        if profiler is None:
            return
        shift = time.time_ns() - time.monotonic_ns()
        events = profiler.profiler.kineto_results.events()
        if len(events) > MOST_OPERATORS:
            self.failure = f"kept only the first {MOST_OPERATORS} operators of {len(events)}"
        for first in range(0, min(len(events), MOST_OPERATORS), PART):
            names: dict[str, int] = {}
            spans = []
            for event in events[first : first + PART]:
                begin = event.start_ns() - shift
                number = names.setdefault(event.name(), len(names))
                end = begin + event.duration_ns()
                spans.append((number, begin, end, event.start_thread_id()))
            yield Operators(names=list(names), spans=spans)
