"""Simulated hit rates: hints are no worse than LRU; the command line prints what it computed."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.experts.conftest import state

from fireflyer.cli.app import run_line
from fireflyer.errors import ConfigError
from fireflyer.experts import sim, streams
from fireflyer.experts.folder import add
from fireflyer.storage import open_storage


@pytest.mark.parametrize("stream", ["zipf", "bursty"])
@pytest.mark.parametrize(("seed", "use_s"), [(1, 0.1), (2, 1.0), (3, 4.0)])
def test_hints_hit_more_than_lru_and_wait_less(stream: str, seed: int, use_s: float) -> None:
    setup = sim.Setup(
        experts=30, expert_bytes=10, hot_bytes=40, warm_bytes=120, requests=400, seed=seed,
        cold_rate=10.0, warm_rate=100.0, use_s=use_s,
    )  # fmt: skip
    lru, hints, oracle = (sim.simulate(setup, stream, policy) for policy in sim.POLICIES)
    assert hints.hits >= lru.hits
    assert hints.hot_hits >= lru.hot_hits
    assert hints.switch_s < lru.switch_s
    assert oracle.loads <= hints.loads
    assert lru.late == 0


def test_a_single_request_takes_what_the_rates_say() -> None:
    setup = sim.Setup(
        experts=1, expert_bytes=100, hot_bytes=100, warm_bytes=100, cold_rate=50.0,
        warm_rate=200.0, use_s=3.0, requests=2,
    )  # fmt: skip
    found = sim.simulate(setup, "zipf", "lru")
    assert (found.total_s, found.switch_s, found.loads) == (8.5, 1.25, 1)
    assert (setup.cold_switch_s, setup.warm_switch_s) == (2.5, 0.5)


def test_streams_depend_on_the_seed_alone() -> None:
    for draw in streams.STREAMS.values():
        assert draw(20, 300, 4) == draw(20, 300, 4) != draw(20, 300, 5)
        assert len(draw(20, 300, 4)) == 300
    common = Counter(streams.zipf(20, 20000, 1)).most_common()
    assert common[0][1] / common[1][1] == pytest.approx(2, rel=0.1)
    assert len(set(streams.bursty(20, 50, 1, topic=3, length=1e6))) == 3


def test_an_expert_larger_than_a_tier_is_refused() -> None:
    with pytest.raises(ConfigError, match="larger than hot_bytes"):
        sim.simulate(sim.Setup(hot_bytes=1), "zipf", "lru")


def run(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    code = run_line(["experts", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_command_simulates(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    small: tuple[str, ...] = (
        "sim",
        "--experts",
        "9",
        "--bytes",
        "1G",
        "--hot",
        "2G",
        "--warm",
        "4G",
    )
    small += ("--requests", "60", "--streams", "zipf")
    code, out, _ = run(capsys, *small, "--json")
    found = json.loads(out)
    assert code == 0
    assert [each["policy"] for each in found["outcomes"]] == ["lru", "hints", "oracle"]
    assert found["setup"]["expert_bytes"] == 1 << 30
    assert "15x to 31x" in out
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run(capsys, *small)
    assert code == 0
    assert "arXiv 2405.07518" in out
    assert max(map(len, out.splitlines())) <= 80
    for wrong in (("--bytes", "x"), ("--streams", "zipf,other"), ("--hot", "1M"), ("--use", "-")):
        code, out, err = run(capsys, *small, *wrong)
        assert (code, out, err.count("\n")) == (1, "", 1)


def test_the_command_adds_lists_packs_and_checks(tmp_path: Path, capsys: Any) -> None:
    place = tmp_path / "experts"
    add(open_storage(place), "one", state(1.0))
    source = str(place / "one.safetensors")
    assert run(capsys, "add", str(place), "two", source)[0] == 0
    (place / "three.safetensors").write_bytes((place / "one.safetensors").read_bytes())
    assert "three" in run(capsys, "pack", str(place))[1]
    assert "no new" in run(capsys, "pack", str(place))[1]
    listed = json.loads(run(capsys, "ls", str(place), "--json")[1])
    assert [each["expert"] for each in listed] == ["one", "three", "two"]
    assert run(capsys, "check", str(place))[0] == 0
    data = bytearray((place / "two.safetensors").read_bytes())
    data[-1] ^= 1
    (place / "two.safetensors").write_bytes(data)
    code, out, err = run(capsys, "check", str(place), "--json")
    assert code == 1
    assert json.loads(out)["one"] == "good"
    assert "expert two is damaged" in json.loads(out)["two"]
    assert "1 of 3" in err
    code, _, err = run(capsys, "add", str(place), "one", source)
    assert code == 1
    assert "remove it first" in err
