"""The benchmark of fireflyer.nn, small: every case has its rows, exact ones hold their goals."""

import pytest
import torch

from fireflyer.bench.__main__ import app
from fireflyer.bench.nn import benchmark, training
from fireflyer.bench.nn.kept import peak_of
from fireflyer.program import run_app


def test_kept_bytes_reach_their_goals() -> None:
    rows = benchmark.run(benchmark.Spec(("kept",), scale=16), lambda _: None)
    assert len(rows) == 7
    assert not [row.case for row in rows if row.missed and "LM head" not in row.case]


def test_a_peak_is_that_of_tensors_alive_at_once() -> None:
    def step() -> None:
        for _ in range(3):
            first = torch.empty(1 << 20, dtype=torch.uint8)
            second = torch.empty(2 << 20, dtype=torch.uint8)
            del first, second

    assert peak_of(step) == pytest.approx(3, abs=0.01)


@pytest.mark.full
def test_times_and_training() -> None:
    only = ("peak", "operators", "head", "bits", "characters")
    spec = benchmark.Spec(only, scale=16, seeds=2, steps=10, rounds=1)
    rows = benchmark.run(spec, lambda _: None)
    cases = [row.case for row in rows]
    assert sum("RMSNorm" in case for case in cases) == 1
    assert sum("bit product" in case for case in cases) == 3
    assert all(row.ratio is not None for row in rows)
    [entropy] = [row.ours for row in rows if row.unit == "bit"]
    assert entropy >= 0.98 * 2


def test_digits_need_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    [row] = training.digits(1, 1, lambda _: None)
    assert row.peer == "scikit-learn is missing"


def test_wrong_options(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "0")
    assert run_app(app, "fireflyer bench", ["nn", "--only", "relu"]) == 2
    assert "invalid name 'relu': expected one of kept, peak, operators" in capsys.readouterr().err
    assert run_app(app, "fireflyer bench", ["nn", "--threads", "0"]) == 2
