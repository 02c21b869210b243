"""Findings of synthetic runs: the injected cause is named first, healthy runs have none."""

import msgspec
import pytest
from tests.draws import drawn, seeds
from tests.haiprof.profiles import HEALTHY, rank, stacks, values

from fireflyer.haiprof.events import PHASES
from fireflyer.haiprof.explain import Finding, explain, verdict
from fireflyer.haiprof.explain.compare import compare
from fireflyer.haiprof.explain.measures import growth, line
from fireflyer.haiprof.phases import Row
from fireflyer.haiprof.records import RankProfile, Sample, StepRecord

SLOW, WAITING = 0.04, {**HEALTHY, "communication": HEALTHY["communication"] + 0.04}


def first(profiles: list[RankProfile]) -> Finding:
    found = explain(profiles)
    assert found
    return found[0]


def with_slow(phase: str, slow: int = 2) -> list[RankProfile]:
    """Returns ranks of which one takes longer in a phase, and the others wait for it."""
    late = {**HEALTHY, phase: HEALTHY[phase] + SLOW}
    return [rank(n, late if n == slow else WAITING) for n in range(4)]


@pytest.mark.parametrize("seed", seeds("haiprof healthy", 40))
def test_a_healthy_run_has_no_finding(seed: int) -> None:
    random = drawn(f"healthy {seed}")
    profiles = []
    for n in range(4):
        jitter = [random.lognormvariate(0, 0.15) for _ in range(60)]
        one = rank(n, jitter=jitter)
        values(one, "basic", {"rss_bytes": 1e9}, {"rss_bytes": 1.002e9})
        values(one, "cpu", {"main_queue_s_total": 0.0, "main_run_s_total": 0.0},
               {"main_queue_s_total": 0.5, "main_run_s_total": 5.0})  # fmt: skip
        stacks(one, {("forward", "model.py", False): 97, ("log", "train.py", True): 3})
        profiles.append(one)
    assert explain(profiles) == []


def noisy(
    seed: int, late_s: float = 0.0, burst_s: float = 0.0, network_s: float = 0.0
) -> list[RankProfile]:
    """Returns four ranks that wait for the last one in each step, on a machine that is often busy.

    Args:
        late_s: by how much rank 1 is late in each step.
        burst_s: by how much rank 1 is late in the first fifth of the session.
        network_s: time of the transfer.
    """
    random = drawn(f"noisy {seed}")
    steps = [[random.expovariate(1 / 0.05) for _ in range(4)] for _ in range(60)]
    for number, late in enumerate(steps):
        late[1] += late_s + (burst_s if number < 12 else 0.0)
    profiles = []
    for n in range(4):
        one = rank(n, steps=0)
        at = 0
        for number, late in enumerate(steps):
            waits = max(late) - late[n] + network_s
            spent = {**dict.fromkeys(PHASES, 0.0), **HEALTHY, "communication": waits}
            spent["forward"] += late[n]
            seconds = sum(spent.values())
            row = Row(step=number, begin_ns=at, seconds=seconds, phases=spent, between={})
            one.add(StepRecord(row=row))
            at += round(seconds * 1e9)
        profiles.append(one)
    return profiles


@pytest.mark.parametrize("seed", seeds("haiprof noisy", 20))
def test_a_rank_that_is_late_in_each_step_is_named_in_any_noise(seed: int) -> None:
    found = explain(noisy(seed, late_s=0.12))
    assert [(f.kind, f.rank) for f in found] == [("slow-rank-cpu", 1)]


@pytest.mark.parametrize("seed", seeds("haiprof busy", 20))
def test_ranks_that_are_late_in_turn_or_for_a_while_are_not_named(seed: int) -> None:
    assert explain(noisy(seed)) == []
    assert explain(noisy(seed, burst_s=1.0)) == []


def test_waiting_for_ranks_that_are_late_in_turn_is_no_transfer() -> None:
    found = explain(noisy(1, network_s=0.2))
    assert [f.kind for f in found] == ["communication"]
    assert found[0].gain_s == pytest.approx(0.2, rel=0.01)


def test_sessions_at_different_times_are_compared_in_order() -> None:
    profiles = with_slow("forward")
    moved = RankProfile(profiles[0].header)
    for row in profiles[0].steps[:20]:
        moved.add(StepRecord(row=msgspec.structs.replace(row, begin_ns=row.begin_ns + 10**12)))
    assert first([moved, *profiles[1:]]).rank == 2


def test_too_few_steps_conclude_nothing() -> None:
    assert explain([rank(n, {"data": 1.0}, steps=4) for n in range(2)]) == []
    assert explain([]) == []
    assert "no optimizer" in verdict([rank(0, steps=0)])


def test_a_rank_without_processor_time_is_named() -> None:
    profiles = with_slow("forward")
    for one in profiles:
        queue = 3.0 if one.header.rank == 2 else 0.1
        values(one, "cpu", {"main_queue_s_total": 0.0, "main_run_s_total": 0.0},
               {"main_queue_s_total": queue, "main_run_s_total": 5.0})  # fmt: skip
    found = first(profiles)
    assert (found.kind, found.rank) == ("slow-rank-cpu", 2)
    assert found.gain_s == pytest.approx(SLOW, rel=0.05)
    assert "Rank 2" in found.sentence
    assert "forward" in found.sentence
    assert len(explain(profiles)) == 1  # not the waits of the others, which are its effect


@pytest.mark.parametrize("phase", ["data", "optimizer"])
def test_a_rank_that_waits_for_its_disk_is_named(phase: str) -> None:
    profiles = with_slow(phase, slow=0)
    for one in profiles:
        share = 0.4 if one.header.rank == 0 else 0.01
        still = {"in_disk_wait": share, "read_bytes_total": 0.0, "written_bytes_total": 0.0}
        values(one, "io", still, {**still, "written_bytes_total": share * 1e8})
    found = first(profiles)
    assert (found.kind, found.rank) == ("slow-rank-disk", 0)


def test_a_rank_whose_data_comes_late_is_named() -> None:
    found = first(with_slow("data", slow=3))
    assert (found.kind, found.rank) == ("slow-rank-data", 3)


def test_a_loader_that_is_slow_everywhere_is_named_with_its_function() -> None:
    slow = {**HEALTHY, "data": 0.05}
    profiles = [rank(n, slow) for n in range(4)]
    found = first(profiles)
    assert (found.kind, found.rank) == ("data", None)
    assert found.share == pytest.approx(0.05 / sum(slow.values()), rel=0.01)


def test_a_lock_is_named_with_its_place() -> None:
    profiles = with_slow("forward", slow=1)
    stacks(profiles[1], {("forward", "model.py", False): 70, ("log", "metrics.py", True): 30})
    found = first(profiles)
    assert (found.kind, found.rank) == ("lock", 1)
    assert "log (metrics.py:7)" in found.sentence


def test_waits_of_loaders_and_collectives_are_not_locks() -> None:
    profiles = [rank(0, world=1)]
    stacks(profiles[0], {("get", "/x/torch/utils/data/dataloader.py", True): 90})
    assert explain(profiles) == []


def test_a_slow_network_is_named_by_the_connections_that_hold_bytes_back() -> None:
    phases = {**HEALTHY, "communication": 0.1}
    profiles = [rank(n, phases) for n in range(4)]
    for one in profiles:
        mine = one.header.rank
        full = {f"blocked_10.0.0.{peer}": 0.0 for peer in range(4) if peer != mine}
        slow = {k: 9e4 if mine == 3 or k == "blocked_10.0.0.3" else 0.0 for k in full}
        for n in range(20):
            one.add(Sample(recorder="io", at_ns=n, values=slow if n % 2 else full))
    found = first(profiles)
    assert (found.kind, found.rank) == ("slow-network", 3)


def test_communication_that_nothing_hides() -> None:
    found = first([rank(n, {**HEALTHY, "communication": 0.08}) for n in range(4)])
    assert (found.kind, found.rank) == ("communication", None)
    assert "hide at most 50.0 ms" in found.evidence[0]


def test_growing_memory_is_named_with_its_rate() -> None:
    profiles = [rank(n) for n in range(4)]
    for one in profiles:
        grown = 60e6 if one.header.rank == 1 else 1e6
        values(one, "basic", {"rss_bytes": 1e9}, {"rss_bytes": 1e9 + grown})
    found = first(profiles)
    assert (found.kind, found.rank) == ("memory-growth", 1)
    assert "1.00 MB a step" in found.sentence


def test_an_idle_gpu_is_named_only_if_the_process_uses_it() -> None:
    one = rank(0, world=1)
    used = {"gpu0_busy": 0.2, "gpu0_process_memory_bytes": 1e9,
            "gpu1_busy": 0.0, "gpu1_process_memory_bytes": 0.0}  # fmt: skip
    values(one, "gpu", used, used)
    found = explain([one])
    assert [finding.kind for finding in found] == ["gpu-idle"]
    assert "80%" in found[0].sentence


def test_time_outside_of_all_phases() -> None:
    one = rank(0, {**HEALTHY, "other": 0.03}, world=1)
    stacks(one, {("log", "train.py", False): 40, ("forward", "model.py", False): 60})
    found = first([one])
    assert found.kind == "other"
    assert "60% of all samples are in forward (model.py:7)" in found.evidence


def test_callbacks_and_the_loop_of_a_trainer_are_named() -> None:
    one = rank(0, {**HEALTHY, "callbacks": 0.02, "framework": 0.04}, world=1)
    framework, callbacks = explain([one])
    assert framework.sentence == "The Trainer's own loop takes 40.0 ms of each step, 25%."
    assert callbacks.sentence == "Callbacks take 20.0 ms of each step, 12%."
    assert callbacks.evidence == ["Reports takes 20.0 ms"]


def test_findings_are_ranked_by_the_time_to_be_won() -> None:
    one = rank(0, {**HEALTHY, "other": 0.02, "data": 0.07}, world=1)
    assert [finding.kind for finding in explain([one])] == ["data", "other"]


def test_the_verdict_names_the_two_longest_phases() -> None:
    assert verdict([rank(0)]) == (
        "A step takes 100.0 ms; backward bounds it with 50%, forward follows with 30%."
    )


def test_a_comparison_tells_changes_from_noise() -> None:
    before, after = rank(0), rank(0, {**HEALTHY, "data": 0.02})
    changes = compare([before], [after])
    assert [change.phase for change in changes[:2]] == ["step", "data"]
    assert changes[1].clear
    assert changes[1].after_s - changes[1].before_s == pytest.approx(0.018)
    assert not any(change.clear for change in compare([before], [before]))


def test_lines_and_rates() -> None:
    assert line([(0, 1), (1, 3), (2, 5)]) == pytest.approx((2.0, 1.0))
    assert line([(0, 1), (1, 1), (2, 1)]) == (0.0, 0.0)
    samples = [Sample(recorder="x", at_ns=n * 10**9, values={"a_total": n * 5.0}) for n in (0, 2)]
    assert growth(samples, "a_total") == 5.0
    assert growth(samples[:1], "a_total") == 0.0
