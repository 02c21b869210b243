"""Runs of the demo that never happened, from which figures and pages are made."""

from typing import Any

import pytest

from fireflyer.demo.dataset import Meta
from fireflyer.demo.metrics import MetricsRecord
from fireflyer.demo.story import Kill, Story, Suspend
from fireflyer.hai.model import Event

META = Meta(
    tokens="bpe",
    vocabulary=1024,
    context=128,
    train_samples=900,
    val_samples=100,
    files=3,
    text_bytes=123456,
    source="/texts/<b>",
    digest="",
    sums={},
)
"""Of a data set; its source wants escaping in a page."""


class Script:
    """Feeds a story with events and lines on a clock of its own; a step takes 0.5 s."""

    def __init__(self, seconds: float) -> None:
        self.story = Story(seconds)
        self.now = 1000.0
        self.step = 0
        self.trained = 0.0
        self.attempt = 0
        self.saved = (0, 0.0)
        self._seq = 0

    def event(self, kind: str, **detail: Any) -> None:
        self._seq += 1
        event = Event(
            seq=self._seq,
            task="t1",
            attempt=self.attempt,
            kind=kind,
            detail=detail,
            monotonic_ns=round(self.now * 1e9),
            wall=self.now,
        )
        self.story.observe([], [event])

    def start(self, world: int = 2) -> None:
        """A new attempt from the newest checkpoint."""
        self.attempt += 1
        self.step, self.trained = self.saved
        self.event("starting")
        for rank in range(world):
            self.event("rank_started", rank=rank, node=f"n{rank}", pid=100 * self.attempt + rank)
        self.event("running")

    def train(self, save: bool = False) -> None:
        """One step; its loss is 6 - step / 10."""
        self.now += 0.5
        self.trained += 0.5
        self.step += 1
        line = MetricsRecord(
            step=self.step,
            loss=6 - self.step / 10,
            tokens=100,
            step_s=0.5,
            comm_s=0.05,
            monotonic=self.now,
            wall=1.7e9 + self.now,
            trained_s=self.trained,
            attempt=self.attempt,
            checkpoint_step=self.saved[0] or None,
            checkpoint_stall_s=0.004 if save else None,
        )
        if save:
            self.saved = (self.step, self.trained)
        self.story.observe([line], [])

    def exit(self, rank: int, signal: int | None = None, suspended: bool = False) -> None:
        code = None if signal else 0
        detail = {"rank": rank, "node": f"n{rank}", "code": code, "signal": signal}
        self.event("rank_exited", **detail, suspended=suspended)


@pytest.fixture
def script() -> Script:
    return Script(20.0)


@pytest.fixture
def finished(script: Script) -> Script:
    """A whole run: killed after 20 steps with a checkpoint at 15, suspended after 30, finished at 40."""
    script.start()
    for step in range(1, 21):
        script.train(save=step in (5, 10, 15))
    action = script.story.next_action()
    assert isinstance(action, Kill)
    script.story.did(action, script.now)
    script.now += 0.02
    script.exit(1, signal=9)
    script.exit(0, signal=9)
    script.event("restarting", reason="rank 1 on n1 was killed by SIGKILL")
    script.now += 0.4
    script.start()
    for _ in range(15):
        script.train()
    action = script.story.next_action()
    assert isinstance(action, Suspend)
    script.story.did(action, script.now)
    script.saved = (script.step, script.trained)
    script.event("suspending")
    script.now += 0.25
    script.exit(0, suspended=True)
    script.now += 0.05
    script.exit(1, suspended=True)
    script.event("suspended")
    action = script.story.next_action()
    assert action is not None
    script.story.did(action, script.now)
    script.now += 0.3
    script.start()
    for _ in range(10):
        script.train()
    script.exit(0)
    script.exit(1)
    script.event("finished")
    return script
