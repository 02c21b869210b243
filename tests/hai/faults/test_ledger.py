"""The ledger: what each cause means, and that the parts add up to the whole over any history."""

import random
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.draws import cases

from fireflyer.cli.ledger.impl import MARKS, bar
from fireflyer.hai.ledger import (
    CAUSES,
    IDLE,
    MOMENT_US,
    Accounting,
    Segment,
    Shape,
    account,
    segments,
    total,
    weights,
)
from fireflyer.hai.model import TERMINAL, Event

NODES = {"n0": 0, "n1": 0, "n2": 0, "n3": 0}


class History:
    """Writes events of several tasks in order."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.shapes: dict[str, Shape] = {}

    def note(self, wall: float, kind: str, task: str = "t1", **detail: Any) -> "History":
        self.shapes.setdefault(task, Shape(task=task, nodes=2))
        self.events.append(
            Event(
                seq=len(self.events) + 1, task=task, attempt=1, kind=kind, detail=detail,
                monotonic_ns=0, wall=wall,
            )
        )  # fmt: skip
        return self

    def submit(self, wall: float, task: str = "t1", nodes: int = 2) -> "History":
        self.shapes[task] = Shape(task=task, nodes=nodes)
        return self.note(wall, "submitted", task).note(wall, "queued", task)

    def start(self, wall: float, running: float, task: str = "t1", *nodes: str) -> "History":
        self.note(wall, "starting", task, nodes=list(nodes or ("n0", "n1")))
        return self.note(running, "running", task)

    def end(self, wall: float, outcome: str, state: str, task: str = "t1") -> "History":
        self.note(wall, "gang_ended", task, outcome=outcome, reason="")
        return self.note(wall, state, task)

    def books(self, until: float, **more: Any) -> Accounting:
        return account(
            list(self.shapes.values()), self.events, until=until, **{"gpus": NODES, **more}
        )


def parts(history: History, until: float = 1000.0) -> dict[str, float]:
    """Node-seconds of t1, without what is 0."""
    found = history.books(until).tasks["t1"]
    assert sum(found.parts.values()) == found.whole
    return {cause: amount / 1e6 for cause, amount in found.parts.items() if amount}


def test_a_task_that_just_runs() -> None:
    history = History().submit(0).start(0, 10).end(110, "finished", "finished")
    assert parts(history) == {"starting": 20.0, "useful": 200.0}


def test_the_start_lasts_until_the_first_heartbeat() -> None:
    history = History().submit(0).start(0, 10)
    history.note(110, "progress", first=30.0, last=109.0, step=9, saved=0.0, saved_step=-1)
    history.end(110, "finished", "finished")
    assert parts(history) == {"starting": 60.0, "useful": 160.0}


def test_work_after_the_last_save_is_lost_in_a_fault_and_the_next_start_is_a_restart() -> None:
    history = History().submit(0).start(0, 10)
    history.note(100, "rank_exited", rank=1, code=1, signal=None, suspended=False)
    history.note(103, "progress", first=20.0, last=99.0, step=9, saved=80.0, saved_step=7)
    history.end(103, "failed", "queued").start(103, 113)
    history.end(213, "finished", "finished")
    assert parts(history) == {
        "starting": 40.0,
        "useful": 2 * 60.0 + 2 * 100.0,
        "lost work": 40.0,
        "fault": 6.0,
        "restart": 20.0,
    }


def test_without_a_save_a_fault_loses_all_of_the_attempt() -> None:
    history = History().submit(0).start(0, 10).end(60, "lost", "failed")
    assert parts(history) == {"starting": 20.0, "lost work": 100.0}


def test_a_hang_is_a_fault_since_the_last_sign_of_life() -> None:
    history = History().submit(0).start(0, 10)
    history.note(100, "observed", what="hang", quiet_s=30.0)
    history.end(101, "failed", "failed")
    assert parts(history) == {"starting": 20.0, "lost work": 120.0, "fault": 62.0}


def test_suspend_and_resume() -> None:
    history = History().submit(0).start(0, 10).note(50, "suspending")
    history.end(53, "suspended", "suspended")
    history.note(90, "resumed").note(90, "queued").start(95, 99)
    history.end(199, "finished", "finished")
    assert parts(history) == {
        "starting": 20.0 + 8.0,
        "useful": 80.0 + 200.0,
        "suspended": 2 * 40.0,
        "fragmentation": 10.0,
    }


def test_a_wait_beside_enough_free_nodes_is_fragmentation() -> None:
    history = History().submit(0, "t0", nodes=3).start(0, 0, "t0", "n0", "n1", "n2")
    history.submit(10, nodes=2)
    history.end(50, "finished", "finished", "t0")
    history.start(70, 70).end(80, "finished", "finished")
    assert parts(history) == {"queue": 80.0, "fragmentation": 40.0, "useful": 20.0}


def elastic(ranks: int = 2) -> History:
    history = History().submit(0).start(0, 0)
    history.shapes["t1"] = Shape(task="t1", nodes=2, ranks_per_node=ranks)
    return history


def lose(history: History, wall: float, rank: int, node: str) -> None:
    history.note(
        wall, "rank_exited", rank=rank, node=node, code=1, signal=None, suspended=False, lost=True
    )


def test_the_share_of_a_lost_rank_is_a_faults_until_another_has_its_place() -> None:
    history = elastic()
    lose(history, 10, 3, "n1")
    history.note(15, "rank_started", rank=3, node="n1", incarnation=1)
    history.note(20, "rank_joined", rank=3, node="n1", incarnation=1)
    history.end(100, "finished", "finished")
    assert parts(history) == {"useful": 195.0, "fault": 5.0}
    assert parts(history, 14.0) == {"useful": 26.0, "fault": 2.0}


def test_a_lost_node_is_a_fault_to_the_end_if_nobody_comes() -> None:
    history = elastic()
    lose(history, 10, 2, "n1")
    lose(history, 10, 3, "n1")
    lose(history, 40, 0, "n0")
    history.note(100, "progress", first=0.0, last=99.0, step=9, saved=90.0, saved_step=7)
    history.end(100, "finished", "finished")
    assert parts(history) == {"useful": 20.0 + 30.0 + 30.0, "fault": 90.0 + 30.0}
    whole = history.books(100.0).cluster
    assert whole.parts["fault"] == 120e6
    assert sum(whole.parts.values()) == whole.whole == 400e6


def test_when_an_elastic_attempt_fails_in_the_end_saved_work_of_those_left_counts() -> None:
    history = elastic()
    lose(history, 10, 2, "n1")
    lose(history, 50, 3, "n1")
    history.note(100, "progress", first=0.0, last=99.0, step=9, saved=80.0, saved_step=7)
    history.end(100, "failed", "failed")
    assert parts(history) == {
        "useful": 10 * 2 + 40 * 1.5 + 30 * 1.0,
        "lost work": 20.0,
        "fault": 40 * 0.5 + 50 * 1.0,
    }


def test_shares_that_are_no_whole_microseconds_still_add_up() -> None:
    history = elastic(ranks=3)
    lose(history, 10, 3, "n1")
    history.end(10.000001, "finished", "finished")
    found = history.books(100.0).tasks["t1"]
    assert sum(found.parts.values()) == found.whole == 20_000_002
    assert found.parts["fault"] == 0


def test_a_task_that_goes_on_is_counted_up_to_now() -> None:
    history = History().submit(0).start(0, 10)
    assert parts(history, 15.0) == {"starting": 20.0, "useful": 10.0}
    assert parts(History().submit(5), 9.0) == {"fragmentation": 8.0}
    history.note(20, "suspending")
    assert parts(history, 25.0) == {"starting": 20.0, "useful": 20.0, "suspended": 10.0}


def test_a_clock_that_went_back_makes_no_negative_time() -> None:
    history = History().submit(100).start(90, 80).end(120, "finished", "finished")
    assert parts(history) == {"useful": 40.0}


def test_since_cuts_off() -> None:
    history = History().submit(0).start(0, 10).end(110, "finished", "finished")
    books = history.books(1000.0, since=100.0)
    assert books.tasks["t1"].whole == 20e6
    assert books.cluster.whole == 4 * 900 * 1e6
    assert books.cluster.parts[IDLE] == 4 * 900 * 1e6 - 20e6


def test_gpus_weigh_where_all_nodes_tell_theirs() -> None:
    history = History().submit(0).start(4, 4).end(14, "finished", "finished")
    books = history.books(14.0, gpus={"n0": 8, "n1": 4, "n2": 8, "n3": 8})
    assert books.unit == "GPU"
    assert books.tasks["t1"].parts["useful"] == 10e6 * 12
    assert books.tasks["t1"].parts["fragmentation"] == 4e6 * 16
    assert weights({"n0": 8, "n1": 0}).unit == "node"
    assert weights({}).unit == "node"


def test_ratios() -> None:
    history = History().submit(0).start(50, 60).end(100, "finished", "finished")
    found = history.books(100.0).tasks["t1"]
    assert found.ettr == pytest.approx(0.4)
    assert found.goodput == pytest.approx(0.8)
    assert total([found, found]).whole == 2 * found.whole
    assert total([]).ettr == 0.0


# -- any history -----------------------------------------------------------------------------------


def play(seed: int) -> History:
    """A random history of some tasks, with events in a credible order and times that sometimes go back."""
    draw = random.Random(seed)
    history = History()
    for number in range(draw.randint(1, 5)):
        task = f"t{number}"
        nodes = draw.sample(sorted(NODES), draw.randint(1, 4))
        wall = draw.uniform(0, 50)

        def later() -> float:
            nonlocal wall
            wall += draw.choice([0.0, draw.uniform(0, 30), draw.uniform(0, 1e-5)])
            return wall if draw.random() < 0.9 else wall - draw.uniform(0, 5)

        history.submit(wall, task, len(nodes))
        shape = Shape(task=task, nodes=len(nodes), ranks_per_node=draw.randint(1, 3))
        history.shapes[task] = shape
        for _ in range(draw.randint(0, 6)):
            if draw.random() < 0.2:
                history.note(later(), "suspended", task)
                history.note(later(), "resumed", task).note(wall, "queued", task)
            history.note(later(), "starting", task, nodes=nodes)
            if draw.random() < 0.8:
                history.note(later(), "running", task)
            if draw.random() < 0.3:
                history.note(later(), draw.choice(["suspending", "stopping"]), task)
            if draw.random() < 0.3:
                code = draw.choice([0, 1, None])
                history.note(
                    later(), "rank_exited", task, rank=0, code=code, signal=None, suspended=False
                )
            for _ in range(draw.choice([0, 0, draw.randint(1, 4)])):
                rank = draw.randrange(len(nodes) * history.shapes[task].ranks_per_node)
                node = nodes[rank // history.shapes[task].ranks_per_node]
                if draw.random() < 0.6:
                    history.note(
                        later(), "rank_exited", task, rank=rank, node=node, code=1, signal=None,
                        suspended=False, lost=True,
                    )  # fmt: skip
                else:
                    history.note(later(), "rank_joined", task, rank=rank, node=node, incarnation=1)
            if draw.random() < 0.2:
                history.note(later(), "observed", task, what="hang", quiet_s=draw.uniform(0, 99))
            if draw.random() < 0.5:
                first, saved = draw.uniform(0, wall + 9), draw.uniform(0, wall + 9)
                history.note(
                    later(), "progress", task, first=first, last=draw.uniform(first, wall + 9), step=1,
                    saved=saved, saved_step=1,
                )  # fmt: skip
            if draw.random() < 0.1:
                break
            outcome = draw.choice(["finished", "failed", "lost", "stopped", "suspended"])
            history.note(later(), "gang_ended", task, outcome=outcome, reason="")
            if draw.random() < 0.2:
                history.note(wall, draw.choice(sorted(TERMINAL)), task)
                break
            history.note(wall, "suspended" if outcome == "suspended" else "queued", task)
            if outcome == "suspended":
                history.note(later(), "queued", task)
    return history


@settings(max_examples=cases(400), deadline=None)
@given(st.integers(0, 1 << 32), st.floats(0, 300), st.floats(0, 300))
def test_the_parts_always_add_up_to_the_whole(seed: int, until: float, since: float) -> None:
    history = play(seed)
    books = history.books(until, since=since)
    for shape in history.shapes.values():
        mine = [event for event in history.events if event.task == shape.task]
        found = segments(mine, until)
        assert all(s.begin < s.end for s in found)
        assert all(a.end == b.begin for a, b in pairwise(found))
        one = books.tasks[shape.task]
        assert sum(one.parts.values()) == one.whole
        assert set(one.parts) == set(CAUSES)
        assert min(one.parts.values()) >= 0
        span = sum(
            min(s.end, books.until) - max(s.begin, books.since) for s in found if clipped(s, books)
        )
        assert one.whole == span * shape.nodes
        assert 0 <= one.held <= one.whole
    assert books.total.whole == sum(one.whole for one in books.tasks.values())
    cluster = books.cluster
    assert sum(cluster.parts.values()) == cluster.whole
    assert min(cluster.parts.values()) >= 0
    assert cluster.whole >= max(0, books.until - books.since) * len(NODES)
    assert sum(v for cause, v in cluster.parts.items() if cause != IDLE) == books.total.held


@settings(max_examples=cases(400), deadline=None)
@given(st.integers(0, 1 << 32), st.floats(3000, 4000))
def test_waits_are_split_at_every_change_of_what_is_held(seed: int, until: float) -> None:
    history = play(seed)
    books = history.books(until)
    found = {
        task: segments([event for event in history.events if event.task == task], until)
        for task in history.shapes
    }
    changes: Counter[int] = Counter()
    for segment in (s for of_task in found.values() for s in of_task):
        changes[segment.begin] += len(segment.held)
        changes[segment.end] -= len(segment.held)
    for task, shape in history.shapes.items():
        wanted = 0
        for wait in (s for s in found[task] if s.cause == "queue"):
            inside = (at for at, change in changes.items() if change and wait.begin < at < wait.end)
            for begin, end in pairwise([wait.begin, *sorted(inside), wait.end]):
                held = sum(change for at, change in changes.items() if at <= begin)
                if len(NODES) - held >= shape.nodes and end - begin >= MOMENT_US:
                    wanted += (end - begin) * shape.nodes
        assert books.tasks[task].parts["fragmentation"] == wanted


def clipped(segment: Segment, books: Accounting) -> bool:
    return segment.end > books.since and segment.begin < books.until


@settings(max_examples=cases(100), deadline=None)
@given(st.integers(0, 1 << 32))
def test_a_bar_has_its_width_and_shows_what_is_big(seed: int) -> None:
    found = play(seed).books(400.0).cluster
    drawn = bar(found, 50)
    assert len(drawn) == 50
    for cause, amount in found.parts.items() if found.whole else ():
        assert abs(drawn.count(MARKS[cause]) - 50 * amount / found.whole) < 1
