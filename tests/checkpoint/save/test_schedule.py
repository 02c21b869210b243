"""When to save: the interval that loses least, what a save costs, and how often runs fail."""

import math
import random

import pytest

from fireflyer.checkpoint.schedule import (
    LONGEST_S,
    PRIOR_S,
    SHORTEST_S,
    Interval,
    Run,
    SaveCost,
    auto_interval,
    best_interval,
    failures_seen,
)


def lost(interval_s: float, cost_s: float, between_s: float) -> float:
    """Expected seconds of machine time a second of training, with failures at random times (Daly's model)."""
    grown = math.expm1((interval_s + cost_s) / between_s)
    return between_s * grown / interval_s


@pytest.mark.parametrize("cost_s", [0.01, 0.5, 10, 300])
@pytest.mark.parametrize("between_s", [600, 3600, 86_400, 1e7])
def test_no_other_interval_loses_less(cost_s: float, between_s: float) -> None:
    chosen = best_interval(cost_s, between_s)
    others = [chosen * 1.02**power for power in range(-150, 150)]
    least = min(lost(other, cost_s, between_s) for other in others)
    assert lost(chosen, cost_s, between_s) <= least * 1.001


def test_where_a_save_costs_more_than_a_failure() -> None:
    assert best_interval(2000.0, 1000.0) == 1000.0


def test_auto_before_and_after_measuring() -> None:
    assert auto_interval(None, 5, 1e6) == SHORTEST_S
    paper = auto_interval(0.5, 0, 0.0)
    assert paper == pytest.approx(293, abs=2)
    assert auto_interval(0.5, 9, 0.0) == pytest.approx(paper / math.sqrt(10), rel=0.01)
    assert auto_interval(0.5, 0, 3 * PRIOR_S) == pytest.approx(2 * paper, rel=0.01)
    assert auto_interval(0.0, 0, 0.0) == SHORTEST_S
    assert auto_interval(1000.0, 0, 0.0) == LONGEST_S
    assert auto_interval(1e9, 0, 0.0) == LONGEST_S


def test_failures_are_runs_that_did_not_leave() -> None:
    runs = [Run(100, None), Run(200, 250), Run(1000, None), Run(1500, None)]
    assert failures_seen(runs, 1600) == (2, 100 + 50 + 500 + 100)
    assert failures_seen([Run(100, None)], 160) == (0, 60)
    assert failures_seen([], 160) == (0, 0)
    assert failures_seen([Run(100, None), Run(90, None)], 95) == (1, 5), "clocks that disagree"


class Job:
    """Steps of `step_s`, slower by `slower` while a save is on its way."""

    def __init__(self, step_s: float, slower: float) -> None:
        self.cost = SaveCost()
        self.step_s, self.slower = step_s, slower
        self.step, self.now, self.left_s = 0, 0.0, 0.0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            busy = self.left_s > 0
            took = self.step_s * (self.slower if busy else 1)
            self.now += took
            self.left_s -= took
            self.step += 1
            self.cost.note(self.step, self.now, self.left_s > 0)

    def save(self, stall_s: float, lasts_s: float) -> None:
        self.now += stall_s
        self.left_s = lasts_s
        self.cost.began(stall_s)


def test_the_cost_is_the_stall_and_the_slow_down() -> None:
    job = Job(step_s=0.125, slower=1.5)
    job.run(20)
    assert job.cost.cost_s is None
    job.save(stall_s=0.3, lasts_s=3.0)
    job.run(15)
    assert job.cost.cost_s is None, "not before it is over"
    job.run(10)
    assert job.cost.cost_s == pytest.approx(0.3 + 16 * 0.0625)
    for stall_s in (0.2, 0.2, 50.0):
        job.save(stall_s, lasts_s=3.0)
        job.run(30)
    assert job.cost.cost_s == pytest.approx((0.2 + 0.3) / 2 + 1.0), "one outlier does not count"


def test_the_cost_of_saves_that_follow_at_once() -> None:
    job = Job(step_s=0.1, slower=2.0)
    job.run(10)
    for _ in range(3):
        job.save(stall_s=0.1, lasts_s=1.0)
        job.run(4)
    assert job.cost.cost_s == pytest.approx(0.1 + 4 * 0.1)


def test_the_cost_without_a_free_step_is_the_stall() -> None:
    cost = SaveCost()
    cost.began(0.2)
    cost.note(1, 10.0, saving=False)
    assert cost.cost_s == pytest.approx(0.2)


def test_looks_come_within_the_time_asked_for() -> None:
    chance = random.Random(3)
    for _ in range(200):
        step_s, within_s = 10 ** chance.uniform(-3, 1), 10 ** chance.uniform(-1, 1)
        interval = Interval(chance.choice([math.inf, 50.0]), 0.0)
        step, now = 0, 0.0
        for _ in range(30):
            due, ahead = interval.decide(step, now, within_s)
            assert ahead > step
            assert (ahead - step) * step_s <= max(within_s, step_s) * (1 + 1e-9)
            assert not due or now >= 50
            now += (ahead - step) * step_s
            step = ahead
