"""Computes the demo's figures from its observations and actions, in CLOCK_MONOTONIC time."""

from statistics import fmean, median

import msgspec

from fireflyer.demo.metrics import MetricsRecord
from fireflyer.demo.story import CompletedAction, Kill, Resume, Story, Suspend

LOSS_LINES = 20
"""Number of steps over which a loss is averaged; `loss_start` is the loss of a single step."""
LEAST_FALL = 0.5
"""Minimum decrease of the loss, in nats, for the run to reach its goal."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures printed by `fireflyer demo --json`. None means "not observed in this run"."""

    steps: int
    """Number of the last optimizer step."""
    tokens_per_s: float
    """Tokens of all steps divided by the time of all steps."""
    loss_start: float
    """Loss of the first step, in nats per token."""
    loss_at_kill: float | None
    """Mean loss of the last steps before the kill."""
    loss_end: float
    """Mean loss of the last steps."""
    val_loss: float | None
    """Loss over the held-out samples, after the last step."""
    kill_detected_s: float | None
    """Time from SIGKILL to the supervisor's event that the rank exited."""
    restart_s: float | None
    """Time from SIGKILL to the first optimizer step that the new attempt finishes."""
    lost_s: float | None
    """Time from the end of the killed attempt's last step until training has completed a step with
    that number again."""
    suspend_s: float | None
    """Time from the request to the exit of the last rank."""
    resume_s: float | None
    """Time from the request to the first finished optimizer step."""
    checkpoint_stall_ms: float | None
    """Median time for which a save blocks a step."""
    checkpoints: int
    """Number of observed saves, without the saves of a suspend and of the end."""
    steps_lost: int | None
    """Last step seen before the kill, minus the step from which training resumed."""
    comm_share: float
    """Time blocked by reductions divided by the time of all steps, on rank 0."""
    attempts: int
    trained_s: float
    orphans: int
    """Number of processes alive after the end whose environment or command line names this run."""


def compute(story: Story, orphans: int, val_loss: float | None = None) -> Figures | None:
    """Computes the figures of a run; returns None if the run made no step."""
    lines = story.lines
    if not lines:
        return None
    spent = sum(line.step_s for line in lines)
    stalls = [line.checkpoint_stall_s for line in lines if line.checkpoint_stall_s is not None]
    kill, suspend, resume = (_completed(story, kind) for kind in (Kill, Suspend, Resume))
    before = [line for line in lines if kill and line.attempt <= kill.attempt]
    after = [line for line in lines if kill and line.attempt > kill.attempt]
    return Figures(
        steps=lines[-1].step,
        tokens_per_s=sum(line.tokens for line in lines) / spent,
        loss_start=lines[0].loss,
        loss_at_kill=_loss(before) if before else None,
        loss_end=_loss(lines),
        val_loss=val_loss,
        kill_detected_s=_exit_after(story, kill, first=True),
        restart_s=after[0].monotonic - kill.at if kill and after else None,
        lost_s=_lost(before, after),
        suspend_s=_exit_after(story, suspend, first=False),
        resume_s=_first_step_after(lines, resume),
        checkpoint_stall_ms=median(stalls) * 1e3 if stalls else None,
        checkpoints=len(stalls),
        steps_lost=before[-1].step - (after[0].step - 1) if before and after else None,
        comm_share=sum(line.comm_s for line in lines) / spent,
        attempts=lines[-1].attempt,
        trained_s=lines[-1].trained_s,
        orphans=orphans,
    )


def problems(figures: Figures | None, story: Story) -> list[str]:
    """Returns the reasons why the run did not reach its goal; empty if it reached its goal."""
    found = []
    if story.state != "finished":
        last = story.events[-1].detail.get("reason", "") if story.events else ""
        found.append(f"the task ended as {story.state}" + (f": {last}" if last else ""))
    if figures is None:
        return [*found, "the task made no optimizer step"]
    if figures.loss_start - figures.loss_end < LEAST_FALL:
        found.append(
            f"the loss went from {figures.loss_start:.2f} to {figures.loss_end:.2f}, "
            f"a fall of less than {LEAST_FALL}"
        )
    if figures.restart_s is None:
        found.append("no step was seen after the kill")
    elif figures.kill_detected_s is None:
        found.append("the platform reported no killed rank")
    if figures.suspend_s is None or figures.resume_s is None:
        found.append("the task was not suspended and resumed; give it more --seconds")
    if figures.orphans:
        found.append(f"{figures.orphans} processes were left behind")
    return found


def _completed(story: Story, kind: type) -> CompletedAction | None:
    return next((done for done in story.completed if isinstance(done.action, kind)), None)


def _loss(lines: list[MetricsRecord]) -> float:
    return fmean(line.loss for line in lines[-LOSS_LINES:])


def _exit_after(story: Story, done: CompletedAction | None, *, first: bool) -> float | None:
    """Returns the seconds from an action to the first or last rank exit of the affected attempt.

    After a kill, only the killed rank counts.
    """
    if done is None:
        return None
    victim = done.action.rank if isinstance(done.action, Kill) else None
    exits = [
        event.monotonic_ns / 1e9
        for event in story.events
        if event.kind == "rank_exited"
        and event.attempt == done.attempt
        and victim in (None, event.detail["rank"])
    ]
    return (min(exits) if first else max(exits)) - done.at if exits else None


def _first_step_after(lines: list[MetricsRecord], done: CompletedAction | None) -> float | None:
    if done is None:
        return None
    fresh = (line.monotonic for line in lines if line.attempt > done.attempt)
    first = next(fresh, None)
    return None if first is None else first - done.at


def _lost(before: list[MetricsRecord], after: list[MetricsRecord]) -> float | None:
    if not before:
        return None
    again = next((line for line in after if line.step >= before[-1].step), None)
    return None if again is None else again.monotonic - before[-1].monotonic
