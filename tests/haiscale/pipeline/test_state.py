"""State of a pipeline: names of the whole model, other numbers of stages, evaluation."""

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.haiscale.pipeline.test_parity import ROWS, batch, criterion, init, model, pipeline
from tests.ports import take_ports
from torch import nn

from fireflyer.checkpoint import CheckpointManager
from fireflyer.haiscale.pipeline import GPipe, PipeDream, partition


def saves(store: str, directory: Path) -> Callable[[int, int], dict[str, Any]]:
    """Trains a step with other values than the model begins with, and saves the state."""

    def body(rank: int, world: int) -> dict[str, Any]:
        init(store, rank, world)
        pipe, _ = pipeline("1f1b", world)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
        x, labels = batch(0)
        pipe.forward_backward(x, criterion=criterion, labels=labels)
        optimizer.step()
        ckpt = CheckpointManager(directory)
        ckpt.save(1, {"model": pipe.state_dict()}).wait()
        return {name: tensor.numpy() for name, tensor in pipe.state_dict().items()}

    return body


@pytest.mark.sample(1)
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_checkpoint_of_four_stages_loads_with_fewer(
    start_gang: Callable[..., Any], store_path: str, tmp_path: Path, stages: int
) -> None:
    saved: dict[str, Any] = {}
    for part in start_gang(saves(store_path, tmp_path / "ckpt"), 4).results():
        saved.update(part)
    assert set(saved) == set(model().state_dict())

    def body(rank: int, world: int) -> dict[str, Any]:
        init(f"{store_path}-again", rank, world)
        pipe, _ = pipeline("1f1b", world)
        CheckpointManager(tmp_path / "ckpt").load(into={"model": pipe.state_dict()}, rest=False)
        return {name: tensor.numpy() for name, tensor in pipe.state_dict().items()}

    loaded: dict[str, Any] = {}
    for part in start_gang(body, stages).results():
        loaded.update(part)
    assert set(loaded) == set(saved)
    assert all((loaded[name] == saved[name]).all() for name in saved)


def test_evaluation_equals_the_whole_model_and_leaves_no_gradient(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    x, labels = batch(3)
    whole = model()
    expected = whole(x).detach()

    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        found = []
        for kind, who in (("gpipe", "all"), ("interleaved", "last"), ("1f1b", "none")):
            pipe, _ = pipeline(kind, world, outputs=who)
            pipe.load_state_dict(whole.state_dict())
            loss, outputs = pipe.evaluate(x, criterion=criterion, labels=labels)
            assert pipe.evaluate(x)[0] is None
            assert all(p.grad is None for p in pipe.parameters())
            assert abs(loss - criterion(expected, labels)) < 1e-12
            found.append(None if outputs is None else outputs.numpy())
        return found

    first, last = start_gang(body, 2).results()
    assert [one is not None for one in first] == [True, False, False]
    assert [one is not None for one in last] == [True, True, False]
    for outputs in (first[0], *last[:2]):
        assert (torch.from_numpy(outputs) - expected).abs().max() < 1e-12


def test_sums_of_losses_autocast_and_bytes(start_gang: Callable[..., Any], store_path: str) -> None:
    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        x = torch.ones(ROWS, 8)
        stage = partition(net, rank, world)
        mean, _ = PipeDream(stage, 4).forward_backward(x, criterion=lambda y: y.square().mean())
        first = [p.grad.clone() for p in stage.parameters() if p.grad is not None]
        stage.zero_grad()
        total, _ = PipeDream(stage, 4, loss_reduction="sum").forward_backward(
            x, criterion=lambda y: y.square().mean() / 4
        )
        again = [p.grad for p in stage.parameters() if p.grad is not None]
        torch.testing.assert_close(again, first)
        assert float(total) == pytest.approx(float(mean))
        half = GPipe(stage, 4, autocast=torch.bfloat16)
        half.forward_backward(x, criterion=lambda y: y.float().square().mean())
        return half.mail.sent_bytes

    sent = start_gang(body, 2).results()
    assert sent == [ROWS * 8 * 2] * 2, "16-bit activations one way, 16-bit gradients the other"
    assert not dist.is_initialized()


@pytest.mark.sample(1)
@pytest.mark.parametrize("stages", [1, 2])
def test_the_example_learns(
    start_gang: Callable[..., Any], capfd: pytest.CaptureFixture[str], stages: int
) -> None:
    script = Path(__file__).parents[3] / "examples" / "llama_pipeline.py"
    port = str(take_ports(1)[0])

    def body(rank: int, world: int) -> None:
        os.environ["MASTER_PORT"] = port
        sys.argv = [script.name, "--stages", str(stages), "--steps", "30"]
        runpy.run_path(str(script), run_name="__main__")

    start_gang(body, 2).results()
    lines = capfd.readouterr().out.splitlines()
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in lines]
    assert len(losses) == 3
    assert losses[-1] < losses[0] / 2
