"""What a report says of each kind of end."""

from typing import Any

from fireflyer.hai.model import Event, TaskSpec, TaskView
from fireflyer.hai.rehearsal.plan import parse
from fireflyer.hai.rehearsal.report import Made, Report, lines, report
from fireflyer.hai.rehearsal.steps import AttemptSteps

SECOND = 1_000_000_000


def task(state: Any = "finished", **fields: Any) -> TaskView:
    spec = TaskSpec(script="/x.py", cwd="/", grace_s=5.0, ranks_per_node=2, **fields)
    return TaskView(
        id="t1", spec=spec, state=state, reason="why", attempt=2, generation=0, members=(),
        restarts=0, ranks=(), directory="/", created=0.0,
    )  # fmt: skip


def event(seconds: float, kind: str, attempt: int = 1, **detail: Any) -> Event:
    return Event(
        seq=1, task="t1", attempt=attempt, kind=kind, detail=detail,
        monotonic_ns=int(seconds * SECOND), wall=0.0,
    )  # fmt: skip


def exited(
    seconds: float, rank: int, *, suspended: bool = False, signal: int | None = None
) -> Event:
    code = None if signal else 0
    return event(seconds, "rank_exited", rank=rank, code=code, signal=signal, suspended=suspended)


def played(
    text: str, history: list[Event], steps: dict[int, tuple[int, int]], view: TaskView
) -> Report:
    plan = parse(text)
    made = [
        Made(planned=planned, attempt=1, monotonic_ns=10 * SECOND, step=None)
        for planned in plan
        if history
    ]
    told = {attempt: AttemptSteps(first=a, last=b) for attempt, (a, b) in steps.items()}
    return report(plan, made, [event(1, "running"), *history], told, view)


LEFT = [
    event(10.1, "suspending"), exited(10.5, 0, suspended=True), exited(10.5, 1, suspended=True),
    event(10.5, "suspended"), event(11.0, "running", 2), event(20.0, "finished", 2),
]  # fmt: skip
DIED = [
    exited(10.02, 1, signal=9), event(10.1, "restarting", reason="rank 1"), event(11.0, "running", 2),
    event(20.0, "finished", 2),
]  # fmt: skip


def test_a_suspend_that_loses_nothing() -> None:
    found = played("suspend@1s", LEFT, {1: (1, 40), 2: (41, 90)}, task())
    line = found.events[0]
    assert found.survived
    assert (line.seen_after_s, line.running_after_s) == (0.5, 1.0)
    assert (line.step_before, line.resumed_from_step, line.steps_lost) == (40, 40, 0)
    assert lines(found) == [
        "rehearsal: survived; the task has finished",
        "  ok  suspend@1s: seen after 0.500 s; running again after 1.000 s; resumed from step 40 of 40; "
        "0 steps lost; attempt 2 continued",
    ]


def test_a_script_that_never_asks() -> None:
    history = [exited(15, 0, signal=9), exited(15, 1, signal=9), *LEFT[3:]]
    found = played("suspend@1s", history, {}, task())
    assert not found.survived
    assert found.events[0].words.startswith(
        "all ranks never called suspend_requested(), or did not exit after it returned True: killed "
        "after grace_s = 5 s."
    )
    history = [exited(15, 0, suspended=True), exited(15, 1, signal=9), *LEFT[3:]]
    assert (
        played("suspend@1s", history, {}, task()).events[0].words.startswith("rank 1 never called")
    )


def test_a_suspend_that_loses_steps_is_not_survived() -> None:
    found = played("suspend@1s", LEFT, {1: (1, 40), 2: (31, 90)}, task())
    assert (found.survived, found.events[0].steps_lost) == (False, 10)
    assert "10 steps were lost despite the suspend request" in found.events[0].words


def test_a_kill_loses_what_was_done_since_the_checkpoint() -> None:
    found = played("kill-rank1@1s", DIED, {1: (1, 47), 2: (41, 90)}, task())
    line = found.events[0]
    assert found.survived
    assert (line.seen_after_s, line.running_after_s) == (0.02, 1.0)
    assert (line.resumed_from_step, line.steps_lost) == (40, 7)


def test_what_begins_again_is_not_survived() -> None:
    found = played("kill-rank1@1s", DIED, {1: (1, 47), 2: (1, 90)}, task())
    assert not found.survived
    assert found.events[0].words.startswith("nothing was resumed: attempt 2 began again at step 1.")


def test_no_restart_left() -> None:
    found = played("kill-node0@1s", [DIED[0], event(10.1, "failed")], {1: (1, 47)}, task("failed"))
    assert not found.survived
    assert found.events[0].words == "no attempt ran after it was killed: the task has failed: why"


def test_an_attempt_that_was_too_short_to_tell_steps_is_not_the_one_that_resumed() -> None:
    history = [*DIED[:3], event(12, "running", 3), event(20.0, "finished", 3)]
    found = played("kill-rank1@1s", history, {1: (1, 47), 2: (0, 0), 3: (41, 90)}, task())
    assert found.events[0].running_after_s == 1.0
    plan = parse("kill-rank1@1s")
    made = [Made(planned=plan[0], attempt=1, monotonic_ns=10 * SECOND, step=None)]
    told = {
        1: AttemptSteps(first=1, last=47),
        2: AttemptSteps(),
        3: AttemptSteps(first=41, last=90),
    }
    line = report(plan, made, history, told, task()).events[0]
    assert (line.running_after_s, line.steps_lost, line.survived) == (2.0, 7, True)


def test_an_elastic_task_goes_on_in_its_attempt() -> None:
    history = [
        exited(10.02, 1, signal=9), event(11.5, "rank_joined", rank=1, node="n0"),
        event(20.0, "finished"),
    ]  # fmt: skip
    found = played("kill-rank1@1s", history, {1: (1, 90)}, task(elastic=True))
    assert (found.survived, found.events[0].running_after_s) == (True, 1.5)


def test_slow_and_frozen() -> None:
    assert played("slow-node0@1s", [event(20, "finished")], {}, task()).survived
    broke = [event(12, "restarting", reason="rank 0 exited with status 1"), *DIED[2:]]
    found = played("freeze-rank0@1s", broke, {}, task())
    assert (found.survived, found.events[0].seen_after_s) == (False, 2.0)


def test_what_was_not_made_is_not_survived() -> None:
    found = played("suspend@60s,kill-rank0@step9", [], {}, task())
    assert not found.survived
    assert [line.words for line in found.events] == [
        "not rehearsed: the task has finished before that time",
        "not rehearsed: the task has finished before it printed that step",
    ]
    plan = parse("kill-rank0@1s")
    made = [
        Made(planned=plan[0], attempt=1, monotonic_ns=0, step=None, failed="rank 0 does not run")
    ]
    assert report(plan, made, [], {}, task()).events[0].words == "not injected: rank 0 does not run"
