"""The example of experts learns the same on one rank and on two."""

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.ports import take_ports

from fireflyer.checkpoint import CheckpointManager


def test_the_example_learns(
    start_gang: Callable[..., Any], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = Path(__file__).parents[3] / "examples" / "moe_gpt.py"
    losses = {}
    for ranks in (1, 2):
        port = str(take_ports(1)[0])
        folder = str(tmp_path / str(ranks))

        def body(rank: int, world: int, port: str = port, folder: str = folder) -> None:
            os.environ["MASTER_PORT"] = port
            sys.argv = [script.name, "--steps", "20", "--batch", "8", "--directory", folder]
            runpy.run_path(str(script), run_name="__main__")

        start_gang(body, ranks).results()
        lines = capfd.readouterr().out.splitlines()
        losses[ranks] = [float(line.split("loss ")[1].split(",")[0]) for line in lines]
    assert losses[1] == pytest.approx(losses[2], abs=2e-2), "sums of float32 in another order"
    assert losses[2][-1] < losses[2][0] < 5
    one, two = (CheckpointManager(tmp_path / str(n)).load()["model"] for n in (1, 2))
    assert one["blocks.0.moe.experts.up"].shape == two["blocks.0.moe.experts.up"].shape
