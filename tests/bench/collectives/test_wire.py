"""The loss with low-bit wires: a few steps of a tiny model on text made here."""

import random
from pathlib import Path

import pytest

from fireflyer.bench.harness import curves
from fireflyer.bench.train import wire
from fireflyer.bench.train.models import Sizes
from fireflyer.bench.train.wire import FP32, RUNS, WINDOW, Losses


def text_in(folder: Path) -> Path:
    words = ["record", "reduce", "shard", "gather", "wire", "bucket", "step", "loss"]
    chosen = random.Random(0)
    for number in range(8):
        lines = [" ".join(chosen.choices(words, k=9)) for _ in range(400)]
        folder.mkdir(exist_ok=True)
        (folder / f"{number}.txt").write_text("\n".join(lines))
    return folder


@pytest.mark.full
def test_every_wire_learns(tmp_path: Path) -> None:
    sizes = Sizes(vocabulary=300, context=16, width=32, layers=1, heads=2)
    spec = wire.Spec(
        tmp_path / "data", text_in(tmp_path / "text"), steps=40, batch=4, lr=5e-3, sizes=sizes
    )
    said: list[str] = []
    found = wire.run(spec, said.append)
    assert list(found) == list(RUNS)
    reference = found[FP32]
    for name, losses in found.items():
        assert len(losses.steps) == 40
        assert losses.steps[0] == pytest.approx(reference.steps[0], rel=1e-3), "one start"
        assert losses.steps[-1] < losses.steps[0] - 0.5, name
        assert 0 < losses.held_out < losses.steps[0]
        assert name == FP32 or losses.steps != reference.steps, "the wire rounds"
    rows = wire.rows(found)
    assert len(rows) == 3 * (len(RUNS) - 1)
    svg = wire.plot(found)
    assert all(name in svg for name in RUNS)
    assert said[0] == "text to records"


def test_distances_are_percent_of_the_reference() -> None:
    flat = Losses([2.0] * 60, 2.0)
    found = {FP32: flat, "other": Losses([2.0] * 40 + [2.01] * 10 + [2.0] * 10, 2.02)}
    end, held_out, most = wire.rows(found)
    assert end.ours == pytest.approx(0.25)  # half of the last WINDOW steps are 0.5 % above
    assert held_out.ours == pytest.approx(1.0)
    assert held_out.missed
    assert most.ours == pytest.approx(0.25)
    assert wire.smooth([1.0, 3.0]) == [1.0, 2.0]
    assert WINDOW == 20


def test_curves_lie_where_their_values_say() -> None:
    panel = curves.Panel(
        "title", "unit", "axis",
        [curves.Curve("ours", [(1, 0.0), (4, 1.0)]), curves.Curve("theirs", [(2, 0.5)], True)],
        0.0, 1.0, (1, 2, 4), log=True,
    )  # fmt: skip
    svg = curves.draw("a < b", [panel])
    assert "a &lt; b" in svg
    left, right = 56.0, curves.WIDTH - 20.0
    bottom, top = curves.HEIGHT - 42.0, 44.0
    assert f'points="{left:.1f},{bottom:.1f} {right:.1f},{top:.1f}"' in svg
    assert f'cx="{(left + right) / 2:g}" cy="{(bottom + top) / 2:g}"' in svg
    assert "theirs, 2: 0.5" in svg
