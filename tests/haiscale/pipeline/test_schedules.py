"""Schedules against the published formulas, and under durations drawn at random."""

import random
from collections.abc import Iterator

import pytest
from tests import draws

from fireflyer.errors import ConfigError
from fireflyer.haiscale.pipeline import schedules
from fireflyer.haiscale.pipeline.schedules import Kind, Schedule, schedule

COSTS = ((1.0, 1.0, 1.0), (2.0, 3.0, 1.0), (3.0, 4.0, 3.0))
"""Forward, input gradient, weight gradient. ZB-H1's formula needs a weight gradient that costs at
most a forward and at most an input gradient."""


def valid(microbatches: int = 64) -> Iterator[tuple[str, int, int, int]]:
    for ranks in range(1, 17):
        for batches in range(1, microbatches + 1):
            yield schedules.GPIPE, ranks, batches, 1
            if batches >= ranks:
                yield schedules.PIPEDREAM, ranks, batches, 1
                yield schedules.ZERO_BUBBLE, ranks, batches, 1
            if batches % ranks == 0:
                yield from ((schedules.INTERLEAVED, ranks, batches, n) for n in range(2, 5))


def check(plan: Schedule, costs: tuple[float, float, float], source: random.Random) -> None:
    schedules.check(plan)
    assert schedules.bubble(plan, schedules.costs(*costs)) == pytest.approx(
        schedules.published_bubble(plan, *costs)
    )
    assert schedules.live_activations(plan) == schedules.published_activations(plan)
    spans = schedules.timeline(plan, lambda _: source.random(), lambda _: source.random())
    kinds = 3 if plan.kind == schedules.ZERO_BUBBLE else 2
    assert len(spans) == kinds * plan.microbatches * plan.stages


def test_drawn_schedules_match_the_published_formulas() -> None:
    source = draws.drawn("schedules")
    for case in source.sample([*valid()], 25):
        check(schedule(*case), source.choice(COSTS), source)


@pytest.mark.full
def test_all_schedules_match_the_published_formulas() -> None:
    source = draws.drawn("all schedules")
    for number, case in enumerate(valid()):
        check(schedule(*case), COSTS[number % len(COSTS)], source)


def test_messages_of_a_rank_go_one_after_another() -> None:
    plan = schedule(schedules.GPIPE, 2, 4)
    spans = schedules.timeline(plan, schedules.costs(1.0, 1.0, 1.0), lambda _: 3.0)
    begins = {(s.rank, s.action.kind, s.action.microbatch): s.begin for s in spans}
    assert [begins[1, Kind.FORWARD, batch] for batch in range(4)] == [4.0, 7.0, 10.0, 13.0]
    assert begins[0, Kind.BACKWARD, 3] == 14.0 + 2.0 + 4 * 3.0


def test_every_microbatch_passes_every_stage_once_and_in_order() -> None:
    for case in (
        ("gpipe", 3, 5, 1),
        ("1f1b", 3, 5, 1),
        ("interleaved", 2, 4, 3),
        ("zb-h1", 3, 5, 1),
    ):
        plan = schedule(*case)
        for stage in range(plan.stages):
            for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT):
                order = [
                    action.microbatch
                    for action in plan.programs[stage % plan.ranks]
                    if action.kind is kind and action.stage == stage
                ]
                assert order in ([], [*range(plan.microbatches)])


def test_messages_are_counted() -> None:
    assert schedules.messages(schedule("1f1b", 3, 4)) == (4, 8, 4)
    assert schedules.messages(schedule("gpipe", 1, 4)) == (0,)
    assert schedules.messages(schedule("interleaved", 2, 2, 2)) == (6, 6)


def test_a_schedule_that_waits_in_a_circle_is_found() -> None:
    plan = schedule("1f1b", 2, 2)
    first, second = plan.programs
    send = next(action for action in second if action.kind is Kind.SEND_GRADIENT)
    lost = Schedule("1f1b", 2, 2, 1, (first, tuple(a for a in second if a != send)))
    with pytest.raises(ConfigError, match="is sent 0 times and received 1"):
        schedules.check(lost)
    swapped = Schedule("1f1b", 2, 2, 1, (first[::-1], second))
    with pytest.raises(ConfigError, match="never ends: rank 0 waits"):
        schedules.check(swapped)
    elsewhere = Schedule("1f1b", 2, 2, 1, (second, first))
    with pytest.raises(ConfigError, match="is on rank 0, not 1"):
        schedules.check(elsewhere)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (("dance", 2, 2, 1), "invalid schedule 'dance'"),
        (("gpipe", 0, 2, 1), "invalid stages 0"),
        (("gpipe", 2, 2, 2), "invalid num_model_chunks 2"),
        (("1f1b", 4, 3, 1), "invalid chunks 3"),
        (("zb-h1", 4, 3, 1), "invalid chunks 3"),
        (("interleaved", 4, 6, 2), "invalid chunks 6"),
        (("interleaved", 4, 8, 1), "invalid num_model_chunks 1"),
    ],
)
def test_conditions_of_the_papers_are_checked(case: tuple[str, int, int, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        schedule(*case)
