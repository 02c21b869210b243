"""What an attempt died of, what it costs, and where the next one may go."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from fireflyer import heartbeat
from fireflyer.hai import lifecycle
from fireflyer.hai.faults.classifier import (
    EXPLAINS_S,
    LOOK_S,
    AttemptReading,
    FaultClassifier,
    acted,
    last_place,
    loss,
    observed,
    period_s,
    read_attempt,
)
from fireflyer.hai.faults.rules import default_rules, merged, parse
from fireflyer.hai.lifecycle import Note, Task, Verdict
from fireflyer.hai.model import Event, TaskSpec
from fireflyer.hai.model.engine import GangEnded, RankExited
from fireflyer.hai.model.observations import Hang, Network, Observation, Straggler, Xid

TASK = Task(
    id="t1", order=1, nodes=2, world=2, max_restarts=1, max_node_faults=2, state="running", attempt=1,
    placement=("n0", "n1"),
)  # fmt: skip
SPEC = TaskSpec(script="/x.py", cwd="/", nodes=2, watchdog_s=60.0)


def end(outcome: Any = "failed", wall: float = 1000.0, lost: tuple[str, ...] = ()) -> GangEnded:
    return GangEnded(
        task="t1",
        attempt=1,
        outcome=outcome,
        reason="it ended",
        monotonic_ns=1,
        wall=wall,
        lost=lost,
    )


def event(kind: str, wall: float, **detail: Any) -> Event:
    return Event(seq=1, task="t1", attempt=1, kind=kind, detail=detail, monotonic_ns=0, wall=wall)


def crashed(rank: int, wall: float, code: int | None = 1, number: int | None = None) -> list[Event]:
    about = {"rank": rank, "node": f"n{rank}"}
    return [
        event("rank_started", 900.0, pid=1, **about),
        event("rank_exited", wall, code=code, signal=number, suspended=False, **about),
    ]


def flap(wall: float) -> Network:
    return Network(node="n1", wall=wall, device="ib0", state="down")


def of(notes: tuple[Note, ...], kind: str) -> list[dict[str, Any]]:
    return [note.detail for note in notes if note.kind == kind]


def test_the_first_rank_that_failed_is_observed(tmp_path: Path) -> None:
    frames = 'Traceback (most recent call last):\n  File "/a/x.py", line 7\n'
    (tmp_path / "1.log").write_text("working\n" + frames + "OSError: no\n")
    history = [*crashed(1, 990.0, code=3), *crashed(0, 991.0, code=None, number=9)]
    verdict, notes = FaultClassifier(default_rules()).ended(TASK, end(), history, tmp_path)
    assert verdict == Verdict()
    (found,) = of(notes, "observed")
    assert (found["rank"], found["code"], found["place"], found["ran_s"]) == (
        1,
        3,
        "x.py:7 OSError",
        90.0,
    )
    (done,) = of(notes, "acted")
    assert (done["rule"], done["ended"], done["avoid"]) == ("exit", True, [])


def test_what_an_elastic_attempt_survived_did_not_end_it(tmp_path: Path) -> None:
    for rank, name in ((0, "early"), (1, "late")):
        (tmp_path / f"{rank}.log").write_text(name)
    survived = [*crashed(0, 950.0), *crashed(1, 990.0, code=7)]
    for found in survived[1::2]:
        found.detail["lost"] = True
    for history, rank in ((survived, 1), ([*survived, *crashed(0, 999.0)], 0)):
        _, notes = FaultClassifier(default_rules()).ended(TASK, end(), history, tmp_path)
        (seen,) = of(notes, "observed")
        assert seen["rank"] == rank


def exited(code: int | None, number: int | None) -> RankExited:
    return RankExited(
        task="t1", attempt=1, rank=1, node="n1", code=code, signal=number, suspended=False, monotonic_ns=1,
        wall=990.0, lost=True,
    )  # fmt: skip


def test_losses_are_observed_and_explain_no_later_end(tmp_path: Path) -> None:
    (tmp_path / "1.log").write_text("at step 12\n")
    classifier = FaultClassifier(default_rules())
    for event, text in (
        (exited(None, 9), "rank 1: lost: signal 9 at at step #; the other ranks continue"),
        (exited(3, None), "rank 1: lost: exit 3 at at step #; the other ranks continue"),
        (exited(None, None), "rank 1: lost with n1; the other ranks continue"),
    ):
        found = loss(event, tmp_path)
        assert found.text() == text
        assert classifier.observed("t1", 1, found).rule == "loss"
    verdict, notes = classifier.ended(TASK, end(), crashed(0, 999.0), tmp_path)
    assert verdict == Verdict()
    assert [done["rule"] for done in of(notes, "acted")] == ["exit"]


def test_a_rule_may_tell_lost_nodes_from_lost_ranks(tmp_path: Path) -> None:
    lines = [
        'name = "x"',
        'on = "loss"',
        'states = ["node"]',
        "at_least = 2",
        'action = "drain node"',
    ]
    own = parse("\n".join(["[[rule]]", *lines]), "own")
    classifier = FaultClassifier(merged(own, default_rules()))
    rank, node = loss(exited(None, 9), tmp_path), loss(exited(None, None), tmp_path)
    actions = [classifier.observed("t1", 1, found).action for found in (rank, node, rank, node)]
    assert actions == ["note", "note", "note", "drain node"]


def test_a_link_that_was_cut_explains_the_crash_that_follows(tmp_path: Path) -> None:
    classifier = FaultClassifier(default_rules())
    assert classifier.observed("t1", 1, flap(990.0)).action == "restart"
    verdict, notes = classifier.ended(TASK, end(), crashed(0, 999.0), tmp_path)
    assert verdict.cause == "network"
    assert [found["what"] for found in of(notes, "observed")] == ["exit"]
    assert [done["rule"] for done in of(notes, "acted")] == ["link-down"]


def test_what_was_long_ago_or_only_noted_or_of_another_attempt_explains_nothing(
    tmp_path: Path,
) -> None:
    classifier = FaultClassifier(default_rules())
    classifier.observed("t1", 1, flap(1000.0 - EXPLAINS_S - 1))
    classifier.observed("t1", 1, Xid(node="n0", wall=999.0, code=63, device="0"))
    classifier.observed("t1", 2, flap(999.0))
    classifier.observed("t2", 1, flap(999.0))
    verdict, _ = classifier.ended(TASK, end(), crashed(0, 999.0), tmp_path)
    assert verdict.cause == "script"


def test_the_gravest_explanation_wins_and_every_bad_node_is_avoided(tmp_path: Path) -> None:
    classifier = FaultClassifier(default_rules())
    classifier.observed("t1", 1, Xid(node="n0", wall=990.0, code=74, device="0"))
    classifier.observed("t1", 1, Xid(node="n1", wall=991.0, code=79, device="0"))
    verdict, notes = classifier.ended(TASK, end(), crashed(0, 999.0), tmp_path)
    assert (verdict.cause, sorted(verdict.avoid)) == ("node", ["n0", "n1"])
    (done,) = of(notes, "acted")
    assert (done["rule"], done["node"]) == ("xid-uncorrectable", "n1")


def test_how_ranks_ended_that_the_platform_killed_is_no_observation(tmp_path: Path) -> None:
    classifier = FaultClassifier(default_rules())
    classifier.observed("t1", 1, Hang(node="n1", wall=999.0, quiet_s=60.0, rank=1))
    verdict, notes = classifier.ended(
        TASK, end(), crashed(0, 1000.0, code=None, number=9), tmp_path
    )
    assert (verdict.cause, sorted(verdict.avoid)) == ("node", ["n1"])
    assert of(notes, "observed") == []


def test_silent_nodes_are_named(tmp_path: Path) -> None:
    verdict, notes = FaultClassifier(default_rules()).ended(
        TASK, end("lost", lost=("n1",)), [], tmp_path
    )
    assert (verdict.cause, sorted(verdict.avoid)) == ("node", ["n1"])
    assert [found["node"] for found in of(notes, "observed")] == ["n1"]


@pytest.mark.parametrize(
    ("task", "ended"),
    [
        (TASK, end("finished")),
        (TASK, end("suspended")),
        (TASK, end("stopped")),
        (msgspec.structs.replace(TASK, stopping=True), end()),
        (msgspec.structs.replace(TASK, unsure=True), end("lost")),
        (msgspec.structs.replace(TASK, attempt=2), end()),
        (msgspec.structs.replace(TASK, state="queued"), end()),
    ],
)
def test_other_ends_are_no_faults(task: Task, ended: GangEnded, tmp_path: Path) -> None:
    assert FaultClassifier(default_rules()).ended(task, ended, crashed(0, 999.0), tmp_path) == (
        Verdict(),
        (),
    )


def test_a_later_server_knows_what_was_seen(tmp_path: Path) -> None:
    first = FaultClassifier(default_rules())
    past: list[Event] = []
    for found in (flap(900.0), flap(950.0)):
        decision = first.observed("t1", 1, found)
        notes = (observed(found), acted(decision, found.node))
        lines = [event(note.kind, found.wall) for note in notes]
        past += [
            msgspec.structs.replace(line, detail=note.detail)
            for line, note in zip(lines, notes, strict=True)
        ]
    second = FaultClassifier(default_rules(), past)
    assert second.knows("t1", 1, flap(950.0))
    assert not second.knows("t1", 1, flap(951.0))
    assert second.observed("t1", 1, flap(960.0)).rule == "link-flaps"
    verdict, _ = second.ended(TASK, end(), crashed(0, 999.0), tmp_path)
    assert (verdict.cause, sorted(verdict.avoid)) == ("network", ["n1"])


def test_how_far_the_ranks_came_is_written_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank, step in ((0, 8), (1, 7)):
        writer = heartbeat.Writer(str(tmp_path / f"{rank}.pulse"))
        writer.step(step, None)
        writer.saved(step - 2, 500.0 + rank)
    verdict, notes = FaultClassifier(default_rules()).ended(TASK, end("finished"), [], tmp_path)
    (found,) = of(notes, "progress")
    assert (found["step"], found["saved"], found["saved_step"]) == (8, 501.0, 5)
    assert 0 < found["first"] <= found["last"]
    assert verdict == Verdict()


# -- looking ---------------------------------------------------------------------------------------


def told(step: int, steps: tuple[tuple[int, float], ...] = ()) -> heartbeat.Heartbeat:
    return heartbeat.Heartbeat(1.0, 2.0, 0.0, step, -1, steps)


def test_a_gang_that_says_nothing_hangs_and_the_one_behind_is_named() -> None:
    classifier = FaultClassifier(default_rules())
    reading = AttemptReading((10, 10), {0: told(5), 1: told(4)})
    looks: list[tuple[float, list[Observation]]] = [
        (now, classifier.look(TASK, SPEC, reading, now, 1e6 + now))
        for now in (0.0, 59.0, 60.0, 90.0)
    ]
    assert [bool(found) for _, found in looks] == [False, False, True, False]
    assert looks[2][1] == [Hang(node="n1", wall=1e6 + 60.0, quiet_s=60.0, rank=1)]


@pytest.mark.parametrize(
    "later",
    [
        AttemptReading((10, 11), {0: told(5)}),
        AttemptReading((10, 10), {0: told(6)}),
        AttemptReading((10, 10), {}),
    ],
)
def test_a_longer_log_or_a_beat_is_a_sign_of_life(later: AttemptReading) -> None:
    classifier = FaultClassifier(default_rules())
    assert classifier.look(TASK, SPEC, AttemptReading((10, 10), {0: told(5)}), 0.0, 0.0) == []
    assert classifier.look(TASK, SPEC, later, 59.0, 0.0) == []
    assert classifier.look(TASK, SPEC, later, 118.0, 0.0) == []
    assert len(classifier.look(TASK, SPEC, later, 119.0, 0.0)) == 1


def test_a_new_attempt_is_watched_anew() -> None:
    classifier = FaultClassifier(default_rules())
    reading = AttemptReading((10, 10), {})
    assert classifier.look(TASK, SPEC, reading, 0.0, 0.0) == []
    again = msgspec.structs.replace(TASK, attempt=2)
    assert classifier.look(again, SPEC, reading, 100.0, 0.0) == []


def test_stragglers_are_seen_without_a_watchdog_and_shown() -> None:
    classifier = FaultClassifier(default_rules())
    task = msgspec.structs.replace(TASK, nodes=4, world=4, placement=("n0", "n1", "n2", "n3"))
    spec = msgspec.structs.replace(SPEC, nodes=4, watchdog_s=0.0)
    heartbeats = {
        rank: told(20, tuple((step, 3.0 if rank == 2 else 1.0) for step in range(1, 20)))
        for rank in range(4)
    }
    (found,) = classifier.look(task, spec, AttemptReading((), heartbeats), 0.0, 5.0)
    assert found == Straggler(node="n2", wall=5.0, rank=2, factor=3.0, steps=16)
    assert classifier.step_of("t1", 1, 2) == (20, 3.0)
    assert classifier.step_of("t1", 1, 0) == (20, 0.0)
    assert classifier.step_of("t1", 2, 0) == (None, 0.0)


def test_what_is_read_of_an_attempt(tmp_path: Path) -> None:
    (tmp_path / "0.log").write_text("abc")
    (tmp_path / "x.pulse").write_text("?")
    (tmp_path / "1.pulse").write_text("torn")
    heartbeat.Writer(str(tmp_path / "0.pulse")).step(4, None)
    reading = read_attempt(tmp_path, 2, logs=True)
    assert (reading.sizes, set(reading.heartbeats), reading.heartbeats[0].step) == ((3, -1), {0}, 4)
    assert read_attempt(tmp_path / "nowhere", 2, logs=False) == AttemptReading((), {})


def test_how_often_to_look() -> None:
    specs = [msgspec.structs.replace(SPEC, watchdog_s=s) for s in (0.0, 1800.0)]
    assert period_s(specs) == LOOK_S
    short = [msgspec.structs.replace(SPEC, watchdog_s=s) for s in (4.0, 0.1)]
    assert (period_s(short[:1]), period_s(short)) == (1.0, 0.1)
    assert period_s([]) == LOOK_S


@pytest.mark.parametrize(
    ("log", "place"),
    [
        ("", ""),
        ("step 17 of 900: loss 0.31\n", "step # of #: loss #.#"),
        ('Traceback (most recent call last):\n  File "/a/b/t.py", line 3, in <module>\n'
         '  File "/a/c.py", line 12, in f\n    x()\nValueError: no 17\n', "c.py:12 ValueError"),
        ('Traceback (most recent call last):\n  File "t.py", line 3\nmy.own.Error\n', "t.py:3 my.own.Error"),
    ],
)  # fmt: skip
def test_where_a_log_says_that_it_ended(log: str, place: str) -> None:
    assert last_place(log) == place


# -- what it costs ---------------------------------------------------------------------------------


def after(task: Task, verdict: Verdict) -> Task:
    return lifecycle.observe(task, end(), verdict).task


def again(task: Task) -> Task:
    changes = {"state": "running", "placement": ("n0", "n1")}
    return msgspec.structs.replace(task, **changes)


def test_faults_of_nodes_have_a_budget_of_their_own() -> None:
    task = TASK
    for cause in ("node", "network"):
        task = after(again(task), Verdict(cause=cause))
        assert (task.state, task.restarts) == ("queued", 0)
    assert task.node_faults == 2
    failed = after(again(task), Verdict(cause="node"))
    assert (failed.state, failed.reason) == (
        "failed", "it ended; the limit of 2 node faults is reached",
    )  # fmt: skip
    task = after(again(task), Verdict())
    assert (task.state, task.restarts) == ("queued", 1)
    assert after(again(task), Verdict()).state == "failed"


def test_a_rule_can_end_a_task_before_its_budget_is_used() -> None:
    task = after(TASK, Verdict(stop="enough"))
    assert (task.state, task.reason) == ("failed", "it ended; enough")
