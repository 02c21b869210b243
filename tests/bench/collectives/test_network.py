"""The network benchmark on a small lab: bytes are counted exactly, every candidate runs in every order."""

import pytest

from fireflyer.bench.__main__ import app
from fireflyer.bench.collectives import network
from fireflyer.bench.harness.hosts import Area
from fireflyer.lab import namespaces
from fireflyer.program import run_app

SIZE = 1 << 20


@pytest.mark.full
@pytest.mark.netns
def test_two_hosts() -> None:
    if reason := namespaces.why_not():
        pytest.skip(f"needs network namespaces: {reason}")
    spec = network.Spec(
        hosts=2,
        ranks_per_host=2,
        rate="1gbit",
        sizes=(SIZE,),
        wires=(),
        orders=("contiguous", "round-robin"),
        rounds=2,
    )
    rows = network.run(spec)
    assert [row.peer for row in rows] == ["2S(H-1)/H", "line rate", "gloo", "gloo"] * 2
    assert [row.case.split(",")[0] for row in rows[::4]] == ["2x2 contiguous", "2x2 round-robin"]
    for row in rows[::4]:
        assert (
            row.bound == SIZE
        )  # two hosts: each sends its sums of one half, then its half of the result
        assert SIZE <= row.ours <= 1.02 * SIZE


@pytest.mark.parametrize(
    ("hosts", "order", "placed"),
    [(2, "contiguous", [0, 0, 0, 1, 1, 1]), (2, "round-robin", [0, 1, 0, 1, 0, 1])],
)
def test_orders(hosts: int, order: str, placed: list[int]) -> None:
    area = Area(None, 3, "", nodes=hosts, order=order)
    assert [area.host_of(rank) for rank in range(area.ranks)] == placed


def test_without_root_the_error_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(namespaces, "why_not", lambda: "namespaces need root")
    assert run_app(app, "fireflyer bench", ["network"]) == 1
    assert capsys.readouterr().err == "fireflyer: no lab here: namespaces need root\n"
