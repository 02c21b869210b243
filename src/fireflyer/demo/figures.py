"""The demo's figures, computed from what was seen and done. Durations are of CLOCK_MONOTONIC."""

from statistics import fmean, median

import msgspec

from fireflyer.demo.metrics import Line
from fireflyer.demo.story import Deed, Kill, Resume, Story, Suspend

LOSS_LINES = 20
"""Steps over which a loss is averaged, but for the first."""
LEAST_FALL = 0.5
"""Nats by which the loss must have fallen for the run to count."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What `fireflyer demo --json` prints. None: it was not seen in this run."""

    steps: int
    """Number of the last optimizer step."""
    tokens_per_s: float
    """Tokens of all steps over the time of all steps."""
    loss_start: float
    """Of the first step, nats a token."""
    loss_at_kill: float | None
    """Mean of the last steps before the kill."""
    loss_end: float
    """Mean of the last steps."""
    val_loss: float | None
    """Over the samples that were held out, after the last step."""
    kill_detected_s: float | None
    """SIGKILL sent -> the supervisor's event."""
    restart_s: float | None
    """SIGKILL sent -> first optimizer step finished by the new attempt."""
    lost_s: float | None
    """By how much later the training stood again at the step that the kill interrupted."""
    suspend_s: float | None
    """Request -> last rank exited."""
    resume_s: float | None
    """Request -> first optimizer step finished."""
    checkpoint_stall_ms: float | None
    """Median time that a save blocks a step."""
    checkpoints: int
    """Saves seen, without those of a suspend and of the end."""
    steps_lost: int | None
    """Last step seen before the kill - step resumed from."""
    comm_share: float
    """Time blocked by reductions / time of all steps, on rank 0."""
    attempts: int
    trained_s: float
    orphans: int
    """Processes alive after the end whose environment or command line names this run."""


def compute(story: Story, orphans: int, val_loss: float | None = None) -> Figures | None:
    """The figures of a run; None when it made no step."""
    lines = story.lines
    if not lines:
        return None
    spent = sum(line.step_s for line in lines)
    stalls = [line.checkpoint_stall_s for line in lines if line.checkpoint_stall_s is not None]
    kill, suspend, resume = (_deed(story, kind) for kind in (Kill, Suspend, Resume))
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
    """Why the run did not reach its goal; empty when it did."""
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


def _deed(story: Story, kind: type) -> Deed | None:
    return next((deed for deed in story.deeds if isinstance(deed.action, kind)), None)


def _loss(lines: list[Line]) -> float:
    return fmean(line.loss for line in lines[-LOSS_LINES:])


def _exit_after(story: Story, deed: Deed | None, *, first: bool) -> float | None:
    """Seconds from a deed to the first, or the last, exit of a rank of the attempt that it hit.

    For a kill only the killed rank counts.
    """
    if deed is None:
        return None
    victim = deed.action.rank if isinstance(deed.action, Kill) else None
    exits = [
        event.monotonic_ns / 1e9
        for event in story.events
        if event.kind == "rank_exited"
        and event.attempt == deed.attempt
        and victim in (None, event.detail["rank"])
    ]
    return (min(exits) if first else max(exits)) - deed.at if exits else None


def _first_step_after(lines: list[Line], deed: Deed | None) -> float | None:
    if deed is None:
        return None
    fresh = (line.monotonic for line in lines if line.attempt > deed.attempt)
    first = next(fresh, None)
    return None if first is None else first - deed.at


def _lost(before: list[Line], after: list[Line]) -> float | None:
    if not before:
        return None
    again = next((line for line in after if line.step >= before[-1].step), None)
    return None if again is None else again.monotonic - before[-1].monotonic
