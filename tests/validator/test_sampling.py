"""Windows and groups of which the best is a sample: stalls of the machine leave no trace."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.draws import drawn

from fireflyer.validator import fleet
from fireflyer.validator.checks import disk, network
from fireflyer.validator.fleet import Measurements
from fireflyer.validator.model import Settings
from fireflyer.validator.sampling import best_of


def test_groups_alternate() -> None:
    rates = [float(rate) for rate in range(40)]
    assert best_of(rates, 10, "more") == (36.0, 37.0, 38.0, 39.0)
    assert best_of(rates, 10, "less") == (0.0, 1.0, 2.0, 3.0)
    assert best_of([3.0, 9.0, 1.0], 10, "more") == (9.0,)


def test_stalls_name_no_node_and_a_slow_node_is_named() -> None:
    """A fifth of the latencies are stalls of up to 50 times, on any node; one node lost 20 %."""
    draw = np.random.default_rng(drawn("stalls").randrange(2**32))
    times = draw.normal(1.0, 0.02, (8, 200)) * np.where(
        draw.random((8, 200)) < 0.2, draw.uniform(1, 50, (8, 200)), 1
    )
    times[5] *= 1.2
    found = Measurements("less", {})
    for node, of_node in enumerate(times):
        found.add(f"n{node}", best_of(list(of_node), 10, "less"))
    (judged,) = fleet.judge_fleet({"latency": found})
    assert [node.node for node in judged.nodes if node.defective] == ["n5"]


class Clock:
    """Clock that only steps move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(disk, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def step(self, seconds: float) -> float:
        self.now += seconds
        return 1.0


def test_the_first_window_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A throttle lets a burst pass in it; the end of a window counts in its time."""
    clock = Clock(monkeypatch)
    monkeypatch.setattr(disk, "WINDOW_S", 1.0)
    took = iter([1 / 64] * 64 + [1 / 8] * 32)
    rates = disk.windows(4, lambda: clock.step(next(took)), finish=lambda: clock.step(1.0))
    assert rates == [8 / 2.0] * 4


def test_a_disk_slower_than_usual_ends_early_with_few_windows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    rates = disk.windows(10, lambda: clock.step(3.0), most_s=4.0)
    assert rates == pytest.approx([1 / 3] * disk.LEAST_WINDOWS)
    assert len(disk.windows(1, lambda: clock.step(3.0), least=20, most_s=4.0)) == 19


def test_every_window_of_a_transfer_moves_whole_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("QUICK_BYTES", 4 << 20), ("WINDOW_S", 0.0)):
        monkeypatch.setattr(disk, name, value)
    found = {each.name: each for each in disk.run(Settings(directory=str(tmp_path)))}
    assert (tmp_path / "disk").stat().st_size == 4 << 20
    for name in ("disk write", "disk read", "disk random read", "fsync latency"):
        assert len(found[name].samples) == 1
        assert found[name].value == found[name].samples[0]


def test_figures_of_the_network_are_the_best_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second transfer is disturbed, and nine of ten round trips are."""
    monkeypatch.setattr(network, "LOOPBACK_BYTES", 1)

    class Link:
        count = 0

        def send(self, size: int) -> float:
            self.count += 1
            return 1e6 * (10.0 if self.count % 2 else 1.0)

        def echo(self) -> float:
            self.count += 1
            return 1e-6 * (7.0 if self.count > 180 else 500.0)

    link: Any = Link()
    rates = network._rates("bandwidth", link, 1, network.SAMPLES)
    assert (rates.value, rates.samples) == (10.0, (10.0,) * network.SAMPLES)
    times = network._times("latency", link)
    assert times.value == pytest.approx(7.0)
    assert len(times.samples) == network.ECHOES // network.BEST_OF_ECHOES
