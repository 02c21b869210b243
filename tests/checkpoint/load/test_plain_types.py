"""States of other libraries in the types that a checkpoint holds."""

import enum
from collections import Counter, OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fireflyer.checkpoint import CheckpointManager
from fireflyer.checkpoint.state.plain_types import numbers, plain
from fireflyer.errors import CheckpointError

Pair = namedtuple("Pair", "a b")


class Mode(enum.StrEnum):
    MIN = "min"


class Level(enum.IntEnum):
    HIGH = 3


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Counter([7, 7, 11]), {7: 2, 11: 1}),
        (defaultdict(list, a=[1]), {"a": [1]}),
        (OrderedDict(a=OrderedDict(b=1)), {"a": {"b": 1}}),
        (Pair(1, [Pair(2, 3)]), (1, [(2, 3)])),
        (torch.Size([2, 3]), (2, 3)),
        ({Mode.MIN: Mode.MIN, "n": Level.HIGH}, {"min": "min", "n": 3}),
        ([np.float64(0.5), np.int32(3), np.bool_(True)], [0.5, 3, True]),
        (Path("a/b"), "a/b"),
        ([None, True, 2, 0.5, "s", b"b"], [None, True, 2, 0.5, "s", b"b"]),
    ],
)
def test_plain(value: Any, expected: Any, tmp_path: Path) -> None:
    made = plain(value)
    assert made == expected
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"value": made}).wait()
    assert manager.load()["value"] == expected


def test_tensors_stay_and_the_rest_is_refused_by_name(tmp_path: Path) -> None:
    tensor, array = torch.ones(2), np.ones(2)
    made = plain({"t": tensor, "a": array, "x": {"f": print}})
    assert made["t"] is tensor
    assert made["a"] is array
    with pytest.raises(CheckpointError, match=r"cannot save x\.f: a builtins"):
        CheckpointManager(tmp_path).save(1, made)


def test_numbers() -> None:
    metrics = {
        "loss": torch.tensor(0.5),
        "one": torch.tensor([2.0]),
        "np": np.float32(0.25),
        "int": 3,
        "many": torch.ones(2),
        "text": "x",
        "flag": True,
    }
    assert numbers(metrics) == {"loss": 0.5, "one": 2.0, "np": 0.25, "int": 3.0}
