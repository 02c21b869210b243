"""The training script's pieces, and that a resumed run is the run that was never interrupted."""

import argparse
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.demo import gpt
from fireflyer.demo.dataset import Settings, prepare, read_text
from fireflyer.demo.muon import Muon, orthogonalize
from fireflyer.demo.sample import PROMPTS, continue_tokens, write_text


@pytest.fixture
def model() -> gpt.GPT:
    torch.manual_seed(0)
    return gpt.GPT(vocabulary=50, context=16, width=32, layers=2, heads=2)


def stirred(model: gpt.GPT) -> gpt.GPT:
    """The model with no weight at zero, as after some training."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    return model


def test_a_fresh_model_finds_every_token_equally_likely(model: gpt.GPT) -> None:
    tokens = torch.randint(50, (3, 17))
    assert model(tokens[:, :-1]).shape == (3, 16, 50)
    assert gpt.loss_of(model, tokens).item() == pytest.approx(math.log(50), rel=1e-6)


def test_the_default_model_has_about_a_million_parameters() -> None:
    model = gpt.GPT(vocabulary=1024, context=128, width=128, layers=4, heads=4)
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_048_576


def test_a_prediction_depends_on_the_past_alone(model: gpt.GPT) -> None:
    stirred(model)
    tokens = torch.randint(50, (1, 16))
    other = tokens.clone()
    other[0, 9:] = (other[0, 9:] + 1) % 50
    before, after = model(tokens), model(other)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_a_prediction_depends_on_the_order_of_the_past(model: gpt.GPT) -> None:
    stirred(model)
    tokens = torch.tensor([[1, 2, 3, 4]])
    swapped = torch.tensor([[2, 1, 3, 4]])
    assert not torch.allclose(model(tokens)[0, -1], model(swapped)[0, -1])


@pytest.mark.parametrize("shape", [(24, 24), (64, 16), (16, 64), (3, 32, 8)])
def test_orthogonalize_brings_the_singular_values_near_one(shape: tuple[int, ...]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 37
    result = orthogonalize(matrix)
    assert result.shape == matrix.shape
    values = torch.linalg.svdvals(result)
    assert values.max().item() < 1.3
    if (
        shape[-1] != shape[-2]
    ):  # a square Gaussian matrix has singular values near 0 that stay small
        assert values.min().item() > 0.6
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    assert (result * (u @ v)).sum() / (result.norm() * (u @ v).norm()) > 0.95


def test_muon_makes_steps_of_one_size_whatever_the_gradient() -> None:
    weight = torch.nn.Parameter(torch.zeros(16, 64))
    optimizer = Muon([weight], lr=0.1)
    for scale in (1e-3, 1e3):
        before = weight.detach().clone()
        weight.grad = torch.randn(16, 64, generator=torch.Generator().manual_seed(2)) * scale
        optimizer.step()
        step = torch.linalg.svdvals(weight.detach() - before)
        assert step.max().item() < 0.13
        assert step.min().item() > 0.06


@given(
    total=st.integers(1, 50),
    pieces=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    seed=st.integers(0, 3),
)
def test_the_order_of_samples_does_not_depend_on_where_it_is_taken_up(
    total: int, pieces: list[int], seed: int
) -> None:
    whole = gpt.sample_numbers(0, sum(pieces), total, seed)
    position, joined = 0, []
    for piece in pieces:
        joined += gpt.sample_numbers(position, piece, total, seed)
        position += piece
    assert joined == whole
    for epoch in range(sum(pieces) // total):
        assert sorted(whole[epoch * total : (epoch + 1) * total]) == list(range(total))


def test_epochs_and_seeds_are_shuffled_differently() -> None:
    first = gpt.sample_numbers(0, 100, 100, 0)
    assert first != gpt.sample_numbers(100, 100, 100, 0)
    assert first != gpt.sample_numbers(0, 100, 100, 1)


def test_the_learning_rate_warms_up_and_falls() -> None:
    assert 0 < gpt.learning_rate(0) < 0.1
    assert gpt.learning_rate(0.3) == 1
    assert gpt.learning_rate(0.8) == pytest.approx(0.38)
    assert gpt.learning_rate(1) == 0.05


def test_text_continues_its_prompt_and_ends_at_the_end_of_a_file(model: gpt.GPT) -> None:
    stirred(model)
    tokens = continue_tokens(model, [0, 5, 6], length=30, context=16, seed=1)
    assert tokens[:3] == [0, 5, 6]
    assert len(tokens) <= 33
    assert 0 not in tokens[1:]
    assert tokens == continue_tokens(model, [0, 5, 6], length=30, context=16, seed=1)


def small_data(tmp_path: Path) -> Path:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.py").write_text("".join(f"def f_{i}(x): return x * {i}\n" for i in range(400)))
    settings = Settings(vocabulary=300, context=16)
    return prepare(read_text(texts), tmp_path / "data", settings, lambda *_: None)


def arguments(data: Path) -> argparse.Namespace:
    return argparse.Namespace(
        data=data, seconds=math.inf, steps=8, batch=4, width=32, layers=1, heads=1, lr=0.02,
        save_every="1h", seed=0,
    )  # fmt: skip


def test_a_resumed_training_is_bit_for_bit_the_uninterrupted_one(
    tmp_path: Path, start_gang: Any, store_path: str
) -> None:
    """Two ranks train 8 steps; then 5 steps, and 3 more by a new trainer from the checkpoint."""
    data = small_data(tmp_path)

    def body(rank: int, world: int) -> tuple[list[float], list[float], list[float]]:
        torch.set_num_threads(1)
        store = dist.FileStore(store_path, world)
        dist.init_process_group("hfreduce", store=store, rank=rank, world_size=world)
        whole = gpt.Trainer(arguments(data), tmp_path / "whole")
        straight = [whole.train_step()["loss"] for _ in range(8)]
        first = gpt.Trainer(arguments(data), tmp_path / "parts")
        before = [first.train_step()["loss"] for _ in range(5)]
        first.save()
        first.checkpoints.wait()
        dist.barrier()
        second = gpt.Trainer(arguments(data), tmp_path / "parts")
        assert (second.step, second.durable) == (5, 5)
        after = [second.train_step()["loss"] for _ in range(3)]
        assert second.done() == 1
        return straight, before, after

    for straight, before, after in start_gang(body, 2).results():
        assert before + after == straight
        assert straight[-1] < straight[0]


@pytest.mark.parametrize("tokens", ["bpe", "bytes"])
def test_written_text_begins_with_each_prompt(tmp_path: Path, tokens: Any) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.py").write_text("class A: pass\nimport b\ndef c(): pass\n" * 80)
    settings = Settings(tokens=tokens, vocabulary=280, context=16)
    data = prepare(read_text(texts), tmp_path / "data", settings, lambda *_: None)
    vocabulary = 280 if tokens == "bpe" else 256
    model = stirred(gpt.GPT(vocabulary, context=16, width=32, layers=1, heads=1))
    text = write_text(model, data, context=16, length=10)
    for prompt in PROMPTS:
        assert prompt.strip() in text
