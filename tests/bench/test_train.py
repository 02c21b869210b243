"""The benchmark of training steps with tiny models: rows, bytes and equal parameters, never times."""

import time
from typing import Any

import pytest
import torch
from torch import nn

from fireflyer.bench.__main__ import app
from fireflyer.bench.harness.hosts import Area, Place
from fireflyer.bench.harness.ranks import Timing
from fireflyer.bench.harness.report import Row
from fireflyer.bench.train import benchmark as train
from fireflyer.bench.train import models
from fireflyer.bench.train.candidates import (
    CANDIDATES,
    FSDP2,
    LOCAL,
    TORCH_DDP,
    Trainer,
    candidates,
    digest,
)
from fireflyer.bench.train.memory import memory_rows
from fireflyer.bench.train.place import Measured, check
from fireflyer.bench.train.rows import host_rows, lab_rows
from fireflyer.bench.train.table import goal_table
from fireflyer.errors import FireflyerError
from fireflyer.haiscale.gradients import deferred
from fireflyer.lab import namespaces
from fireflyer.program import run_app

pytestmark = pytest.mark.full

TINY = models.Sizes(vocabulary=1024, context=16, width=64, layers=2, heads=2, channels=8)


def ours(ranks_per_host: int) -> list[str]:
    names = candidates(("ddp", "fsdp"), ranks_per_host)
    return [name for name in names if CANDIDATES[name].peer]


def spec(*cases: str, **changed: Any) -> train.Spec:
    return train.Spec(cases, sizes=TINY, rounds=2, steps=2, vgg_ranks_per_host=2, **changed)


def say(_: str) -> None:
    pass


def test_models_have_the_sizes_of_the_real_ones() -> None:
    whole = models.Sizes()
    layers = {
        "gpt": models.gpt_layers(whole),
        "even": models.even_layers(whole),
        "vgg": models.vgg_layers(whole),
    }
    payloads = {name: models.payload(found) for name, found in layers.items()}
    ends = 2 * 8320 * 384
    assert payloads["gpt"] == models.Payload(4 * 17_006_592, 4 * ends)
    assert payloads["even"].whole == pytest.approx(4 * 17_006_592, rel=1e-5)
    assert payloads["even"].root == 0
    assert payloads["vgg"] == models.Payload(4 * 138_357_544, 4 * 138_357_544)
    share = layers["vgg"][-3].flops / sum(layer.flops for layer in layers["vgg"])
    assert share < 0.01, "the first dense layer has most parameters and little work"


def test_stub_and_real_model_are_alike() -> None:
    real = models.gpt(TINY, rank=0)
    layers = models.gpt_layers(TINY)
    stub = models.stub(layers, models.pool_for(layers, 1), rank=0)

    def shapes(module: nn.Module) -> list[torch.Size]:
        return [parameter.shape for parameter in module.parameters()]

    assert sorted(shapes(stub.module)) == sorted(shapes(real.module))
    assert list(map(shapes, stub.units)) == list(map(shapes, real.units))
    assert len(stub.units) == TINY.layers


def test_a_stub_sleeps_as_asked_and_gives_its_gradients_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    layers = [models.Layer(((4, 4), (4,)), 3.0), models.Layer(((8,),), 1.0)]
    pool = models.pool_for(layers, ranks=2)
    work = models.stub(layers, pool, rank=1)
    models.pace(work, 12.0)
    work.loss(work.module).backward()
    assert slept == [3.0, 1.0, 2.0, 6.0]
    for parameter in work.module.parameters():
        gradient = parameter.grad
        assert gradient is not None
        assert gradient.untyped_storage().data_ptr() == pool.untyped_storage().data_ptr()
        assert torch.equal(gradient.flatten(), pool[1024 : 1024 + gradient.numel()])


def test_a_stub_waits_for_what_it_reads() -> None:
    layers = [models.Layer(((4, 4), (4,)), 3.0), models.Layer(((8,),), 1.0)]
    work = models.stub(layers, models.pool_for(layers, ranks=1), rank=0)
    arrived = []

    class Flight:
        stepping = True

        def __init__(self, parameter: nn.Parameter) -> None:
            self.parameter = parameter

        def arrive(self) -> None:
            deferred.restore([self.parameter])
            arrived.append(self.parameter.shape)

    for parameter in work.module.parameters():
        deferred.defer([parameter], Flight(parameter))
    work.loss(work.module)
    assert arrived == [parameter.shape for parameter in work.module.parameters()]


def test_one_host() -> None:
    rows = train.run(spec("host"), say)
    cases = [row.case.split(", ", 2) for row in rows]
    names = ["ddp, synchronous", "ddp", "ZeRO-3, synchronous", "ZeRO-3"]
    whats = ["wall a step", "CPU a step"]
    wanted = [f"{name}, {what}" for name in names for what in whats]
    assert [case[2] for case in cases] == wanted * 2
    assert [case[1] for case in cases] == ["2 ranks"] * 8 + ["4 ranks"] * 8
    assert [row.peer for row in rows] == ([TORCH_DDP] * 4 + [FSDP2] * 4) * 2
    for row in rows:
        assert (row.rounds, row.unit) == (2, "ms")
        assert row.goal is None, "goals are for the whole sizes"


@pytest.fixture
def needs_lab() -> None:
    if reason := namespaces.why_not():
        pytest.skip(f"needs network namespaces: {reason}")


SIZE = sum(p.numel() for p in models.gpt(TINY, 0).module.parameters()) * 4
ROOT = 2 * TINY.vocabulary * TINY.width * 4  # the embedding and the head are in no unit


def bound_of(name: str) -> float:
    """Bytes that each of two hosts must send in a step."""
    twice = (3 * SIZE - ROOT) / 2 if name.startswith("ZeRO-3") else SIZE
    return twice * CANDIDATES[name].wire_bytes / 4


def check_lab_rows(rows: list[Row], names: list[str]) -> None:
    peers = [CANDIDATES[name].peer for name in names]
    assert [row.peer for row in rows] == [
        who for peer in peers for who in (peer, peer, "ideal", "the least")
    ]
    assert [row.case.split(", ", 2)[-1].rsplit(",", 1)[0] for row in rows[::4]] == names
    for name, row in zip(names, rows[3::4], strict=True):
        bound = bound_of(name)
        assert row.bound == bound
        assert bound <= row.ours <= 1.1 * bound + 20_000, (
            "what the parts of a turn say to each other"
        )


@pytest.mark.netns
@pytest.mark.usefixtures("needs_lab")
def test_stubs_on_two_hosts() -> None:
    rows = train.run(spec("stub", layouts=((2, 2),), rate="10gbit", shape="gpt"), say)
    half = len(rows) // 2
    for name, part in (("0.45", rows[:half]), ("1", rows[half:])):
        assert all(row.case.startswith(f"stub gpt 2x2, local {name} of line, ") for row in part)
        check_lab_rows(part, ours(2))


@pytest.mark.netns
@pytest.mark.usefixtures("needs_lab")
def test_a_real_model_on_two_hosts() -> None:
    rows = train.run(spec("gpt", rate="10gbit", families=("fsdp",)), say)
    names = [name for name in ours(1) if CANDIDATES[name].family == "fsdp"]
    assert all(row.case.startswith("gpt 2x1, ") and row.goal is None for row in rows)
    assert "HSDP" not in names, "there is one rank a host"
    assert len(rows) == 4 * len(names) == 16
    for row, name in zip(rows[3::4], names, strict=True):
        assert row.bound == bound_of(name)


def test_every_line_of_the_issue_has_a_row_with_its_goal() -> None:
    """Of the shapes that a run gives, whatever was measured."""

    def measured(names: list[str]) -> Measured:
        timings = {name: [Timing(1e3, 1e3)] for name in names}
        return Measured(timings, {name: [1e6] for name in names}, [1e9])

    payload = models.Payload(600_000, 60_000)
    lab = measured(candidates(("ddp", "fsdp"), 2))
    rows = [
        row
        for case in ("0.45", "1", "gpt")
        for row in lab_rows(f"{case} 2x2", lab, payload, 2, goals_of=case)
    ]
    rows += lab_rows("vgg 2x4", measured([LOCAL, TORCH_DDP, "ddp"]), payload, 2, goals_of="vgg")
    rows += host_rows("host", measured(list(train.HOST)), goals_of="host")
    found = {(row.case, row.peer): 1 / row.goal for row in rows if row.goal is not None}
    for name, (must, over) in {
        "ddp": (1.02, 1.2), "ZeRO-2": (1.02, 1.3), "ZeRO-3": (1.02, 1.3)
    }.items():  # fmt: skip
        assert found[f"gpt 2x2, {name}, sent by a host", "the least"] == pytest.approx(must)
        assert found[f"gpt 2x2, {name}, step", "ideal"] == pytest.approx(over)
    for name, share in {"ZeRO-3": 0.58, "ZeRO-2": 0.55, "ZeRO-3, bf16 both ways": 0.33}.items():
        peer = CANDIDATES[name].peer or ""
        assert found[f"0.45 2x2, {name}, step", peer] == pytest.approx(share)
    for name, share in {"ddp": 0.70, "ddp, bf16": 0.64, "ddp, int8": 0.62}.items():
        assert found[f"1 2x2, {name}, step", TORCH_DDP] == pytest.approx(share)
    assert found["1 2x2, ddp, exposed", TORCH_DDP] == pytest.approx(0.35)
    assert found["vgg 2x4, ddp, step", TORCH_DDP] == pytest.approx(0.6)
    for what in ("wall", "CPU"):
        assert found[f"host, ddp, {what} a step", TORCH_DDP] == pytest.approx(0.95)
        assert found[f"host, ZeRO-3, {what} a step", FSDP2] == pytest.approx(0.8)
    table = goal_table(rows)
    assert len(table.splitlines()) == 2 + len(found)
    assert "| 0.45, ZeRO-3, step | FSDP2 ZeRO-3 | 0.58x, 0.5x | **1x, missed** |  |" in table


def test_what_a_rank_keeps_is_counted(tmp_path: Any) -> None:
    """The smallest of models: what is no parameter, gradient or moment weighs most in it."""
    state, everything = memory_rows("case", Area(None, 4, str(tmp_path)), TINY, goals_of="memory")
    ideal = 4 * SIZE // 4  # parameters, gradients and two moments, on four ranks
    assert state.peer_value == ideal
    assert ideal <= state.ours <= 1.05 * ideal
    assert state.goal == pytest.approx(1 / 1.05)
    unit = (SIZE - ROOT) // TINY.layers
    assert state.ours <= everything.ours <= state.ours + 0.1 * unit, "no unit stays whole"


@pytest.mark.netns
@pytest.mark.usefixtures("needs_lab")
def test_vgg_in_processes_of_its_own() -> None:
    rows = train.run(spec("vgg", rate="10gbit"), say)
    assert {row.rounds for row in rows} == {2}
    assert [row.case for row in rows[::4]] == ["vgg 2x2, ddp, step", "vgg 2x2, ddp, bf16, step"]


def test_rows_follow_from_what_was_measured() -> None:
    """Line 1 MB/s, 600 kB to send, so 600 ms at best; local 500 ms, torch 1200 ms, ours 750 ms."""

    payload = models.Payload(600_000, 0)  # two hosts

    def timings(ms: float) -> list[Timing]:
        return [Timing(ms * 1e3, 0.0)] * 3

    measured = Measured(
        {LOCAL: timings(500), TORCH_DDP: timings(1200), "ddp": timings(750)},
        {"ddp": [606e3] * 3},
        [1e6] * 3,
    )
    step, exposed, over, sent = lab_rows("case", measured, payload, 2, goals_of="1")
    assert [step.ratio, step.of_bound] == pytest.approx([1.6, 0.8])
    assert [step.goal, step.aim] == pytest.approx([1 / 0.70, 1 / 0.62])
    assert (exposed.ours, exposed.peer_value) == (250, 700)
    assert exposed.goal == pytest.approx(1 / 0.35)
    assert [over.peer_value, over.ratio] == pytest.approx([600, 0.8])
    assert over.missed, "1.25 of the ideal is more than 1.2"
    assert sent.ratio == pytest.approx(1 / 1.01)
    assert not sent.missed
    assert [row.goal for row in lab_rows("case", measured, payload, 2, goals_of="")] == [None] * 4


def test_rows_of_one_host() -> None:
    names = (LOCAL, TORCH_DDP, "ddp, synchronous", "ddp")
    timings = {name: [Timing(4e3 - at * 1e3, 8e3)] for at, name in enumerate(names)}
    *synchronous, wall, cpu = host_rows("case", Measured(timings, {}), goals_of="host")
    assert [row.goal for row in synchronous] == [None, None]
    assert [wall.ours, wall.ratio, wall.goal] == pytest.approx([1, 3, 1 / 0.95])
    assert (cpu.ours, cpu.ratio, cpu.missed) == (8, 1, True)


def test_different_parameters_end_the_benchmark(tmp_path: Any) -> None:
    def body(place: Place) -> None:
        weights = torch.full((8,), float(place.rank))
        check(place, {"ddp": Trainer(lambda: None, lambda: None, lambda: [weights])})

    with pytest.raises(FireflyerError, match="ddp: the ranks' parameters differ"):
        Area(None, 2, str(tmp_path)).run(body)


def test_a_digest_sees_one_bit() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(8, 8)
    before = digest(list(layer.parameters()))
    with torch.no_grad():
        layer.bias.view(torch.int32)[3] ^= 1
    assert digest(list(layer.parameters())) != before


def test_wrong_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, "fireflyer bench", ["train", "--shape", "round"]) == 2
    assert "invalid --shape 'round': expected one of even, gpt" in capsys.readouterr().err
    assert run_app(app, "fireflyer bench", ["train", "--only", "resnet"]) == 2
    assert "invalid name 'resnet': expected one of stub, gpt, vgg, host" in capsys.readouterr().err
    for layout in ("1x2", "2", "2x0", "axb"):
        assert run_app(app, "fireflyer bench", ["train", "--layouts", layout]) == 2
        assert f"invalid layout '{layout}': expected HOSTSxRANKS" in capsys.readouterr().err
