"""The scheduler's promises over random histories; `make cluster-histories` runs many more."""

from collections import Counter

import pytest
from tests import draws
from tests.hai.plan.bench import Bench, launched, preempted
from tests.hai.plan.histories import History

from fireflyer.hai.scheduling import planner, preemption


def test_the_promises_hold_over_random_histories() -> None:
    total: Counter[str] = Counter()
    for seed in draws.seeds("histories", 400):
        total += History(seed).run()
    for what in (
        "Launch", "Preempt", "fault", "drain", "suspend", "quota", "ended", "impossible",
        "narrow plan", "narrow find", "move", "moved",
    ):  # fmt: skip
        assert total[what] > 0 or not draws.full(), f"no history had a {what}"


def test_they_hold_where_plans_and_looks_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "BATCH", 2)
    monkeypatch.setattr(preemption, "LOOKS", 1)
    total: Counter[str] = Counter()
    for seed in draws.seeds("short plans", 300):
        total += History(seed).run()
    assert total["Launch"] > 0
    assert total["cut"] > 0


def test_a_plan_with_victims_is_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "BATCH", 2 * planner.PREEMPTION)
    bench = Bench("timeshare", 6)
    bench.submit(*[{"priority": 8}] * 6)
    assert len(preempted(bench.submit(*[{"priority": 30}] * 6))) == 2
    assert bench.cluster.next_look(bench.now) == bench.now, "the next plan goes on at once"
    assert len(preempted(bench.plan())) == 2


def test_a_long_plan_is_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [{"nodes": 1 + number % 3} for number in range(20)]
    whole = launched(Bench("timeshare", 30).submit(*jobs))
    monkeypatch.setattr(planner, "BATCH", 4)
    bench = Bench("timeshare", 30)
    actions = bench.submit(*jobs)
    parts = [len(actions)]
    while bench.cluster.next_look(bench.now) == bench.now:
        more = bench.plan()
        parts.append(len(more))
        actions += more
    assert launched(actions) == whole
    assert max(parts) == 4
