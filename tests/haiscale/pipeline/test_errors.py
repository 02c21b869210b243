"""Bad input and dead ranks: one typed error on every rank, and no rank hangs."""

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.haiscale.pipeline.test_parity import (
    CHUNKS,
    batch,
    criterion,
    init,
    model,
    pipeline,
)
from torch import nn

from fireflyer.errors import CollectiveError, ConfigError
from fireflyer.haiscale.pipeline import GPipe, PipeDream, partition


def errors(start_gang: Callable[..., Any], body: Callable[[int, int], Any], world: int = 2) -> Any:
    gang = start_gang(body, world)
    return [gang.result(rank) for rank in range(world)]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("rows", "rank 0: invalid x of stage 0: 14 rows do not divide into 4 micro-batches"),
        ("labels", "rank 1: invalid labels of stage 1: 3 rows do not divide"),
        ("few", "invalid labels of stage 1: 4 rows do not match the 16 rows of x"),
        ("no x", "invalid x of stage 0: expected tensors"),
        ("criterion", "invalid criterion None on stage 1"),
        ("vector", "invalid criterion on stage 1: it returned .* expected a scalar"),
        (
            "raises",
            "the criterion on stage 1 cannot take .* and the labels \\(none\\): .* missing 1",
        ),
        ("shapes", "the module of stage 1 cannot take its input"),
        ("chunks", "the ranks of a pipeline disagree: chunks is 4 on rank 0, 8 on rank 1"),
        ("swapped", "rank 0 of 2 needs the stages \\[0\\], not \\[1\\]"),
        ("module", "expected a stage from partition"),
        ("checkpoint", "rank 1: invalid checkpoint 'often'"),
    ],
)
def test_bad_input_is_the_same_error_on_every_rank(
    start_gang: Callable[..., Any], store_path: str, case: str, words: str
) -> None:
    def body(rank: int, world: int) -> None:
        init(store_path, rank, world)
        net: Any = model()
        if case == "shapes":
            net[5] = nn.Linear(3, 3).double()
        place = 1 - rank if case == "swapped" else rank
        stage: Any = partition(net, place, world, balance=[4, 5])
        if case == "module" and rank == 1:
            stage = nn.Linear(3, 3)
        chunks = 8 if case == "chunks" and rank == 1 else CHUNKS
        options: dict[str, Any] = (
            {"checkpoint": "often"} if case == "checkpoint" and rank == 1 else {}
        )
        pipe = PipeDream(stage, chunks, **options)
        rows, labels = batch(0)
        x = {"rows": rows[:14], "no x": None}.get(case, rows)
        targets: Any = labels[: {"labels": 3, "few": 4}.get(case)] if case != "raises" else ()
        loss: Any = {"criterion": None, "vector": lambda y, _: y}.get(case, criterion)
        pipe.forward_backward(x, criterion=loss, labels=targets)

    found = errors(start_gang, body)
    assert all(isinstance(error, ConfigError) for error in found), found
    assert str(found[0]) == str(found[1])
    with pytest.raises(ConfigError, match=words):
        raise found[0]


def test_a_pipeline_goes_on_after_arguments_that_were_refused(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    def body(rank: int, world: int) -> float:
        init(store_path, rank, world)
        pipe, _ = pipeline("gpipe", 2)
        for limit in ("1", -1.0, float("nan")):
            with pytest.raises(ConfigError, match="invalid max_norm"):
                pipe.clip_grad_norm_(limit)
        x, labels = batch(0)
        with pytest.raises(ConfigError):
            pipe.forward_backward(x[:3], criterion=criterion, labels=labels[:3])
        loss, _ = pipe.forward_backward(x, criterion=criterion, labels=labels)
        smaller, _ = pipe.forward_backward(x[:8, :3], criterion=criterion, labels=labels[:8, :3])
        assert smaller != loss
        return float(loss)

    first, second = errors(start_gang, body)
    assert first == second


def test_an_error_of_the_users_code_is_told_to_every_rank(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    def body(rank: int, world: int) -> None:
        init(store_path, rank, world)
        pipe, _ = pipeline("gpipe", 2)
        x, labels = batch(0)
        pipe.forward_backward(x, criterion=lambda y, _: y.absent, labels=labels)

    other, raised = errors(start_gang, body)
    assert isinstance(raised, AttributeError)
    assert isinstance(other, CollectiveError)
    assert "pipeline rank 1 raised AttributeError: " in str(other)


class Dies(nn.Module):
    """Kills its process in the forward or the backward of one micro-batch."""

    def __init__(self, in_backward: bool, call: int) -> None:
        super().__init__()
        self.calls, self.in_backward = call, in_backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_backward:
            x.register_hook(lambda grad: self.count())
        else:
            self.count()
        return x

    def count(self) -> None:
        self.calls -= 1
        if self.calls == 0:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.sample(2)
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("call", [1, 3])
def test_a_killed_rank_is_a_typed_error_on_all_others(
    start_gang: Callable[..., Any], store_path: str, in_backward: bool, victim: int, call: int
) -> None:
    def body(rank: int, world: int) -> None:
        init(store_path, rank, world)
        net = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(6, 6), Dies(in_backward, call if stage == victim else 0))
                for stage in range(world)
            )
        )
        pipe = GPipe(partition(net, rank, world), CHUNKS)
        for _ in range(2):
            pipe.forward_backward(torch.ones(8, 6), criterion=lambda y: y.sum())

    found = errors(start_gang, body, 3)
    assert found[victim] is None
    others = [error for rank, error in enumerate(found) if rank != victim]
    assert all(isinstance(error, CollectiveError) for error in others), found
