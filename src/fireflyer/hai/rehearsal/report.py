"""Report on each event of a rehearsal, as numbers and text. Pure: computed from the task's history,
the times of the injected events, and the steps that the script printed."""

from collections.abc import Mapping, Sequence

import msgspec

from fireflyer.hai.model import Event, TaskView
from fireflyer.hai.rehearsal.plan import Planned
from fireflyer.hai.rehearsal.steps import AttemptSteps


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """An event of the plan and the result of its injection."""

    planned: Planned
    attempt: int
    monotonic_ns: int
    """CLOCK_MONOTONIC, as in the history."""
    step: int | None
    """Last step printed before the event."""
    failed: str = ""
    """Reason why the injection failed; empty: the event was injected."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the report."""

    event: str
    made: bool
    survived: bool
    seen_after_s: float | None = None
    """Time until the history showed the event's effect; None: it showed no effect, or no effect is
    expected."""
    running_after_s: float | None = None
    """Time until all ranks ran again; None if they did not."""
    step_before: int | None = None
    resumed_from_step: int | None = None
    steps_lost: int | None = None
    """Number of steps done twice; None if the script printed no steps."""
    words: str
    """Description of what happened, with the reason if the task did not survive."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Report of a rehearsal."""

    survived: bool
    """True if every event was injected and survived, and the task has finished."""
    state: str
    events: tuple[Outcome, ...]


def report(
    plan: Sequence[Planned],
    made: Sequence[Made],
    history: Sequence[Event],
    steps: Mapping[int, AttemptSteps],
    task: TaskView,
) -> Report:
    """Returns the report of a task that is over.

    Args:
        plan: the planned events.
        made: the events that were tried.
        history: all events of the task.
        steps: printed steps, by attempt.
        task: view of the task after its end.
    """
    of = {id(item.planned): item for item in made}
    lines = tuple(
        _outcome(of[id(planned)], made, history, steps, task)
        if id(planned) in of
        else _missed(planned, task)
        for planned in plan
    )
    survived = task.state == "finished" and all(line.survived for line in lines)
    return Report(survived=survived, state=task.state, events=lines)


def _missed(planned: Planned, task: TaskView) -> Outcome:
    when = "it printed that step" if planned.at_step is not None else "that time"
    why = f"the task has {task.state} before {when}"
    return Outcome(event=planned.text, made=False, survived=False, words=f"not rehearsed: {why}")


def _outcome(
    item: Made,
    made: Sequence[Made],
    history: Sequence[Event],
    steps: Mapping[int, AttemptSteps],
    task: TaskView,
) -> Outcome:
    planned = item.planned
    if item.failed:
        return Outcome(
            event=planned.text, made=False, survived=False, words=f"not injected: {item.failed}"
        )
    later = [event for event in history if event.monotonic_ns >= item.monotonic_ns]
    if planned.kind == "resume":
        return _resumed(item, later)
    if planned.kind in ("freeze-rank", "slow-node"):
        return _slowed(item, later, task, made)
    if planned.kind == "suspend":
        return _suspended(item, later, steps, task)
    return _killed(item, later, steps, task)


def _after(item: Made, event: Event | None) -> float | None:
    return None if event is None else (event.monotonic_ns - item.monotonic_ns) / 1e9


def _first(events: Sequence[Event], *kinds: str) -> Event | None:
    return next((event for event in events if event.kind in kinds), None)


def _resumed(item: Made, later: Sequence[Event]) -> Outcome:
    running = _first(later, "running")
    words = "the task ran again" if running else "the task never ran again"
    return Outcome(
        event=item.planned.text, made=True, survived=running is not None,
        running_after_s=_after(item, running), words=words,
    )  # fmt: skip


def _slowed(item: Made, later: Sequence[Event], task: TaskView, made: Sequence[Made]) -> Outcome:
    ends = (e for e in later if e.kind in ("restarting", "failed") and e.attempt == item.attempt)
    broke = next(ends, None)
    if broke is not None and any(_caused(other, broke) for other in made):
        broke = None
    survived = broke is None and task.state == "finished"
    words = "the attempt continued"
    if broke is not None:
        words = f"the attempt ended meanwhile or later: {broke.detail.get('reason', broke.kind)}"
    elif not survived:
        words = f"the task has {task.state}: {task.reason}"
    return Outcome(
        event=item.planned.text, made=True, survived=survived, seen_after_s=_after(item, broke),
        step_before=item.step, words=words,
    )  # fmt: skip


def _caused(kill: Made, end: Event) -> bool:
    """Returns whether a kill of the plan ended the attempt."""
    before = kill.attempt == end.attempt and kill.monotonic_ns <= end.monotonic_ns
    return before and kill.planned.kind in ("kill-rank", "kill-node")


def _suspended(
    item: Made, later: Sequence[Event], steps: Mapping[int, AttemptSteps], task: TaskView
) -> Outcome:
    away = _first(later, "suspended", "finished", "failed", "stopped")
    if away is None or away.kind != "suspended":
        ended = away.kind if away else task.state
        words = f"the task has {ended} before it could be suspended"
        return Outcome(event=item.planned.text, made=True, survived=False, words=words)
    exits = [e for e in later if e.kind == "rank_exited" and e.attempt == item.attempt]
    silent = sorted(e.detail["rank"] for e in exits if not _left_by_itself(e))
    again = _again(item, later, steps)
    survived, words = _resumption(item, again, steps, task, "suspended")
    if silent:
        ranks = (
            "all ranks"
            if len(silent) == task.spec.nodes * task.spec.ranks_per_node
            else ("rank" + "s" * (len(silent) > 1) + " " + ", ".join(map(str, silent)))
        )
        survived = False
        words = (
            f"{ranks} never called suspend_requested(), or did not exit after it returned True: killed "
            f"after grace_s = {task.spec.grace_s:g} s. {words}"
        )
    return _line(item, away, again, survived, words, steps)


def _left_by_itself(event: Event) -> bool:
    return bool(event.detail["suspended"]) or event.detail["code"] == 0


def _killed(
    item: Made, later: Sequence[Event], steps: Mapping[int, AttemptSteps], task: TaskView
) -> Outcome:
    gone = _first(later, "rank_exited", "gang_ended")
    joined = _first(later, "rank_joined") if task.spec.elastic else None
    if joined is not None and joined.attempt == item.attempt:
        survived = task.state == "finished"
        words = "the other ranks continued, and a newcomer replaced the lost rank"
        return Outcome(
            event=item.planned.text, made=True, survived=survived, seen_after_s=_after(item, gone),
            running_after_s=_after(item, joined), step_before=item.step, words=words,
        )  # fmt: skip
    again = _again(item, later, steps)
    survived, words = _resumption(item, again, steps, task, "killed")
    return _line(item, gone, again, survived, words, steps)


def _again(item: Made, later: Sequence[Event], steps: Mapping[int, AttemptSteps]) -> Event | None:
    """Returns the start of the next attempt that printed a step. If no attempt printed one, returns
    the start of the next attempt."""
    begins = [e for e in later if e.kind == "running" and e.attempt > item.attempt]
    telling = [e for e in begins if e.attempt in steps and steps[e.attempt].first is not None]
    return next(iter(telling or begins), None)


def _resumption(
    item: Made, again: Event | None, steps: Mapping[int, AttemptSteps], task: TaskView, what: str
) -> tuple[bool, str]:
    """Returns whether the task resumed from its saved state, and a description."""
    if again is None:
        return (
            False,
            f"no attempt ran after it was {what}: the task has {task.state}: {task.reason}",
        )
    before, after = steps.get(item.attempt), steps.get(again.attempt)
    ended = (
        "" if task.state == "finished" else f"; the task has {task.state} in the end: {task.reason}"
    )
    if before is None or before.first is None or after is None or after.first is None:
        return (
            not ended,
            f'attempt {again.attempt} ran, but printed no steps: print "step N"{ended}',
        )
    lost = _lost(before, after)
    if after.resumed_from in (None, 0) and after.first <= before.first and lost:
        return False, (
            f"nothing was resumed: attempt {again.attempt} began again at step {after.first}. Does the "
            f"script load its newest checkpoint, and did it save one before?{ended}"
        )
    if what == "suspended" and lost:
        return False, (
            f"{lost} steps were lost despite the suspend request: save before hai.suspended(){ended}"
        )
    return not ended, f"attempt {again.attempt} continued{ended}"


def _lost(before: AttemptSteps, after: AttemptSteps) -> int:
    """Returns the number of steps of `before` that `after` repeats."""
    assert before.last is not None
    assert after.first is not None
    begin = after.first if after.resumed_from is None else after.resumed_from + 1
    return max(before.last - begin + 1, 0)


def _line(
    item: Made,
    seen: Event | None,
    again: Event | None,
    survived: bool,
    words: str,
    steps: Mapping[int, AttemptSteps],
) -> Outcome:
    before = steps.get(item.attempt)
    after = None if again is None else steps.get(again.attempt)
    known = (
        before is not None and before.last is not None
        and after is not None and after.first is not None
    )  # fmt: skip
    resumed = lost = None
    if known and before is not None and after is not None and after.first is not None:
        resumed = after.first - 1 if after.resumed_from is None else after.resumed_from
        lost = _lost(before, after)
    return Outcome(
        event=item.planned.text,
        made=True,
        survived=survived,
        seen_after_s=_after(item, seen),
        running_after_s=_after(item, again),
        step_before=None if before is None else before.last,
        resumed_from_step=resumed,
        steps_lost=lost,
        words=words,
    )


def lines(found: Report) -> list[str]:
    """Formats the report as text for users."""
    text = [
        f"rehearsal: {'survived' if found.survived else 'NOT survived'}; the task has {found.state}"
    ]
    for item in found.events:
        facts = []
        if item.seen_after_s is not None:
            facts.append(f"seen after {item.seen_after_s:.3f} s")
        if item.running_after_s is not None:
            facts.append(f"running again after {item.running_after_s:.3f} s")
        if item.resumed_from_step is not None:
            facts.append(f"resumed from step {item.resumed_from_step} of {item.step_before}")
        if item.steps_lost is not None:
            facts.append(f"{item.steps_lost} steps lost")
        mark = "ok " if item.survived else "BAD"
        text.append(f"  {mark} {item.event}: " + "; ".join([*facts, item.words]))
    return text
