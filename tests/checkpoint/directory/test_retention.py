"""Retention: what stays, against a definition written another way, on thousands of random directories."""

import math
import random
from typing import Any

import pytest

from fireflyer.checkpoint.directory.manifest import Generation
from fireflyer.checkpoint.retention import Candidate, Keep, retired
from fireflyer.errors import ConfigError


def made(*rows: tuple[int, float | None]) -> list[Candidate]:
    """Checkpoints of (step, loss), in the order of their saves."""
    return [
        Candidate(Generation(1, number, step), step, {} if loss is None else {"loss": loss})
        for number, (step, loss) in enumerate(rows, 1)
    ]


def gone(rows: list[Candidate], keep: Keep) -> list[int]:
    return [one.generation.number for one in retired(rows, keep)]


def test_the_last_by_the_time_of_their_save() -> None:
    rows = made((100, None), (200, None), (110, None), (120, None))
    assert gone(rows, Keep(last=2)) == [1, 2]
    assert gone(rows[::-1], Keep(last=2)) == [1, 2]
    assert gone(rows, Keep()) == [1]
    assert gone([], Keep(last=1)) == []


def test_every_nth_step_once() -> None:
    rows = made((100, None), (150, None), (200, None), (100, None), (160, None))
    assert gone(rows, Keep(last=1, every=100)) == [1, 2]
    rows = made((0, None), (7, None), (9, None))
    assert gone(rows, Keep(last=1, every=5)) == [2]


def test_the_best_of_a_metric() -> None:
    rows = made((1, 0.5), (2, 0.1), (3, math.nan), (4, None), (5, 0.1), (6, 0.9), (7, None))
    assert gone(rows, Keep(last=1, best=1, metric="loss")) == [1, 2, 3, 4, 6]
    assert gone(rows, Keep(last=1, best=2, metric="loss")) == [1, 3, 4, 6]
    assert gone(rows, Keep(last=1, best=2, metric="loss", mode="max")) == [2, 3, 4, 5]
    assert gone(rows, Keep(last=1, best=9, metric="loss")) == [3, 4]
    assert gone(rows, Keep(last=1, best=9, metric="accuracy")) == [1, 2, 3, 4, 5, 6]
    infinite = made((1, math.inf), (2, -math.inf), (3, 0.0), (4, None))
    assert gone(infinite, Keep(last=1, best=1, metric="loss")) == [1, 3]


def test_random_directories() -> None:
    chance = random.Random(5)
    losses = [None, math.nan, 0.0, 1.0, 2.0, math.inf]
    for _ in range(3000):
        rows = made(
            *((chance.randrange(12), chance.choice(losses)) for _ in range(chance.randrange(12)))
        )
        best = chance.choice([None, 1, 2])
        keep = Keep(
            last=chance.randint(1, 4),
            every=chance.choice([None, 1, 3]),
            best=best,
            metric=None if best is None else "loss",
            mode=chance.choice(["min", "max"]),
        )
        shuffled = chance.sample(rows, len(rows))
        left = set(gone(shuffled, keep))
        for index, one in enumerate(rows):
            newer = rows[index + 1 :]
            stays = len(newer) < keep.last
            if keep.every is not None and one.step % keep.every == 0:
                stays |= all(other.step != one.step for other in newer)
            if keep.best is not None and not math.isnan(one.metrics.get("loss", math.nan)):
                stays |= sum(_beats(other, one, keep.mode) for other in rows) < keep.best
            assert (one.generation.number not in left) == stays, (rows, keep, one)


def _beats(other: Candidate, one: Candidate, mode: str) -> bool:
    a, b = other.metrics.get("loss", math.nan), one.metrics["loss"]
    if math.isnan(a):
        return False
    return (a < b if mode == "min" else a > b) or (a == b and other.generation > one.generation)


@pytest.mark.parametrize(
    "wrong",
    [
        {"last": 0},
        {"last": None},
        {"last": True},
        {"last": 2.0},
        {"every": 0},
        {"every": "5min"},
        {"best": -1, "metric": "loss"},
        {"best": 1},
        {"metric": "loss"},
        {"best": 1, "metric": ""},
        {"best": 1, "metric": 3},
        {"best": 1, "metric": "loss", "mode": "least"},
    ],
)
def test_what_cannot_work_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="Keep"):
        Keep(**wrong)


def test_half_of_a_rule_names_the_other_half() -> None:
    """And nothing that the caller has not written."""
    with pytest.raises(ConfigError, match=r"^Keep\(best=1\) lacks the name of the metric"):
        Keep(best=1)
    with pytest.raises(ConfigError, match=r"^Keep\(metric='loss'\) lacks the number"):
        Keep(metric="loss")


def test_a_number_is_the_last_so_many() -> None:
    assert Keep.of(3) == Keep(last=3)
    assert Keep.of(None) is None
    assert Keep.of(Keep(last=2, every=4)) == Keep(last=2, every=4)
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(ConfigError, match="invalid keep"):
            Keep.of(wrong)  # type: ignore[arg-type]
