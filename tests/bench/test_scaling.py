"""The model of a step: hand-computed programs, bounds that must hold, and a small run in the lab."""

import dataclasses

import pytest

from fireflyer.bench.scaling import benchmark as scaling
from fireflyer.bench.scaling.model import (
    PROGRAMS,
    Compute,
    Costs,
    Instruction,
    Start,
    StepEnds,
    Training,
    Wait,
    simulate,
    step_s,
)
from fireflyer.bench.train import models
from fireflyer.bench.train.models import Layer
from fireflyer.lab import namespaces

FREE = Costs(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
BYTE = dataclasses.replace(FREE, byte_s=1.0)  # one byte a second
GPT = models.gpt_layers(models.Sizes())
VGG = models.vgg_layers(models.Sizes())


def test_a_channel_carries_one_at_a_time_the_most_urgent_first() -> None:
    program: list[Instruction] = [
        Start("reduce", "a", 2.0, 0),
        Start("reduce", "b", 2.0, 1),
        Start("reduce", "c", 2.0, 9),
        Compute(1.0),
        Wait("c"),  # after a, which had begun
        StepEnds(),
        Wait("b"),
        StepEnds(),
    ]
    assert simulate(program) == pytest.approx([4.0, 6.0])


def test_channels_share_the_line() -> None:
    program: list[Instruction] = [
        Start("reduce", "a", 3.0),
        Start("gather", "b", 1.0),
        Wait("b"),
        StepEnds(),
        Wait("a"),
        StepEnds(),
        Compute(5.0),
        StepEnds(),
    ]
    assert simulate(program) == pytest.approx([2.0, 4.0, 9.0])


def test_waiting_for_what_nobody_starts_is_an_error() -> None:
    with pytest.raises(ValueError, match="which was not started"):
        simulate([Wait("a")])


def test_ring_tree_and_direct() -> None:
    costs = Costs(1.0, 10.0, 5.0, 0.0, 0.0, 0.0)
    assert costs.allreduce(100, 2, 1) == 5 + 100 + 10
    assert costs.allreduce(1000, 4, 1) == 5 + 1500 + 6 * 10, "a ring"
    assert costs.allreduce(1, 4, 1) == 5 + 3 + 10, "everybody to everybody"
    assert costs.half(100, 4, 1) == 5 + 75 + 3 * 10
    assert costs.allreduce(100, 64, 1) == 5 + 200 + 2 * 6 * 10, (
        "126 hops of a ring would last longer"
    )
    slow = dataclasses.replace(costs, memory_byte_s=10.0)
    assert slow.allreduce(100, 2, 4) == 5 + 4 * 100 * 10, "memory is slower than the line"
    assert slow.allreduce(100, 2, 1) == 115, "one rank has nothing to reduce in memory"


@pytest.mark.parametrize("kind", PROGRAMS)
def test_without_communication_a_step_is_its_work(kind: str) -> None:
    for layers in (GPT, VGG, models.even_layers(models.Sizes())):
        assert step_s(kind, Training(layers, 3.0, 4, 2), FREE) == pytest.approx(3.0)


def test_a_step_lasts_as_long_as_its_bytes_where_they_are_more() -> None:
    """Layers of equal size; no compute: the line never rests."""
    layers = [Layer(((1 << 18,),), 1.0, number) for number in range(1, 9)]
    size = 8 * 4 * (1 << 18)
    for kind, travels in (
        ("ddp", 2.0),
        ("ddp, synchronous", 2.0),
        ("ZeRO-2", 2.0),
        ("ZeRO-3", 3.0),
    ):
        found = step_s(kind, Training(layers, 1e-9, 4, 1), BYTE)
        assert found == pytest.approx(travels * size * 3 / 4), kind


def test_ddp_by_hand() -> None:
    """Two layers of one bucket each, forward 1 s and backward 2 s a layer, 3 s a reduction.

    Synchronous: forward until 2, backward of layer 1 until 4, its bucket is carried until 7; backward of
    layer 0 until 6, its bucket is carried from 7 to 10. Deferred gains nothing: the next forward begins
    with layer 0.
    """
    layers = [Layer(((1 << 19,),), 1.0), Layer(((1 << 19,),), 1.0)]
    size = 4 * (1 << 19)
    costs = dataclasses.replace(FREE, byte_s=3.0 / size)
    training = Training(layers, 6.0, 2, 1)
    assert step_s("ddp, synchronous", training, costs) == pytest.approx(10.0)
    assert step_s("ddp", training, costs) == pytest.approx(10.0)
    embedded = [Layer(((1 << 19,),), 0.0), *layers]  # first to be needed, last to be there
    assert step_s("ddp", Training(embedded, 6.0, 2, 1), costs) > 6.0


def test_crossing_hides_what_classic_shows() -> None:
    costs = dataclasses.replace(FREE, byte_s=1e-8)
    size = models.payload(VGG).whole
    training = Training(VGG, size * costs.byte_s, 2, 4)
    defers, synchronous = (step_s(kind, training, costs) for kind in ("ddp", "ddp, synchronous"))
    assert training.local_s <= defers < synchronous <= 2.01 * training.local_s


@pytest.mark.parametrize("kind", PROGRAMS)
def test_bounds_hold(kind: str) -> None:
    """A step is never shorter than its work or its bytes, and never longer than both and all its calls."""
    costs = Costs(8e-9, 1e-4, 3e-4, 1e-10, 2e-10, 3e-10)
    for layers in (GPT, VGG):
        size = models.payload(layers).whole
        for hosts in (2, 4, 16):
            for local in (0.1, 1.0, 5.0):
                found = step_s(kind, Training(layers, local, hosts, 2), costs)
                line = 2 * size * (hosts - 1) / hosts * costs.byte_s
                assert max(local, line) <= found
                calls = 200 * (costs.call_s + 2 * hosts * costs.message_s)
                assert found <= local + 1.5 * line + calls + 6 * size * 3e-10


LAB = Costs(8.4e-9, 6e-4, 3e-4, 1.5e-10, 2e-10, 3e-10)


def test_the_error_is_that_of_the_model_either_way() -> None:
    over, under = scaling.compared("case", 1.05, 1.0), scaling.compared("case", 0.88, 1.0)
    assert [over.ours, under.ours] == pytest.approx([5.0, 12.0])
    assert [over.missed, under.missed] == [False, True]
    assert "model 880 ms, lab 1,000 ms (-12.0%)" in under.case


def test_weak_scaling_costs_more_on_more_hosts_and_less_behind_more_work() -> None:
    for kind, layers in (("ddp", VGG), ("ZeRO-3", GPT)):
        found = scaling.modelled(kind, layers, (2, 4, 16), LAB)
        for curve in found.values():
            assert [ranks for ranks, _ in curve] == [16, 32, 128]
            assert curve[0][1] == 1.0
            assert min(over for _, over in curve) >= 0.999
        assert found[2.0][-1][1] < found[0.5][-1][1], "work hides what more hosts cost"


def test_the_figures_show_the_papers_numbers() -> None:
    svg = scaling.figures(LAB)
    assert "paper, HaiScale, 512: 1.153" in svg
    assert "paper, HaiScale, 128: 1.044" in svg
    assert "paper, torch, 32: 2" in svg
    assert "Weak scaling: a model" in svg


@pytest.mark.full
@pytest.mark.netns
def test_a_small_calibration_in_the_lab() -> None:
    if reason := namespaces.why_not():
        pytest.skip(f"needs network namespaces: {reason}")
    small = models.Sizes(vocabulary=1024, context=16, width=64, layers=2, heads=2)
    spec = scaling.Spec(((2, 1),), "10gbit", rounds=1, steps=1, sizes={"tiny": small})
    costs, rows = scaling.run(spec, lambda _: None)
    assert all(value >= 0 for value in dataclasses.astuple(costs))
    assert costs.byte_s > 0
    assert [row.case.split(":")[0] for row in rows[6:]] == [
        f"{kind} 2x1, tiny, local {local} of line"
        for local in ("0.45", "1")
        for kind in ("ddp", "ZeRO-3")
    ]
