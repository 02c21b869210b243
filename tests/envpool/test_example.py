"""The PPO example learns CartPole, and solves it in `make test-all`."""

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "examples" / "ppo_cartpole.py"


@pytest.mark.parametrize(
    ("updates", "mean"), [(20, 60.0), pytest.param(300, 475.0, marks=pytest.mark.full)]
)
def test_ppo(updates: int, mean: float) -> None:
    """Random actions last for 22 steps; with 475 the task is solved."""
    train: Callable[[int, int, int], tuple[float, int]] = runpy.run_path(str(SCRIPT))["train"]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert train(32, 1, updates)[0] >= mean
    finally:
        torch.set_num_threads(threads)
