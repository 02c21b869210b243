"""The model of a step: hand-computed programs, bounds that must hold, and costs found again by the fit."""

import dataclasses

import pytest

from fireflyer.bench import train_models
from fireflyer.bench.scaling_model import (
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
from fireflyer.bench.train_models import Layer

FREE = Costs(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
BYTE = dataclasses.replace(FREE, byte_s=1.0)  # one byte a second
GPT = train_models.gpt_layers(train_models.Sizes())
VGG = train_models.vgg_layers(train_models.Sizes())


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
    with pytest.raises(ValueError, match="nobody has started"):
        simulate([Wait("a")])


def test_ring_and_tree() -> None:
    costs = Costs(1.0, 10.0, 5.0, 0.0, 0.0, 0.0)
    assert costs.allreduce(100, 2, 1) == 5 + 100 + 2 * 10
    assert costs.half(100, 4, 1) == 5 + 75 + 3 * 10
    assert costs.allreduce(100, 64, 1) == 5 + 200 + 2 * 6 * 10, (
        "126 hops of a ring would last longer"
    )
    slow = dataclasses.replace(costs, memory_byte_s=10.0)
    assert slow.allreduce(100, 2, 4) == 5 + 4 * 100 * 10, "memory is slower than the line"
    assert slow.allreduce(100, 2, 1) == 125, "one rank has nothing to reduce in memory"


@pytest.mark.parametrize("kind", PROGRAMS)
def test_without_communication_a_step_is_its_work(kind: str) -> None:
    for layers in (GPT, VGG, train_models.even_layers(train_models.Sizes())):
        assert step_s(kind, Training(layers, 3.0, 4, 2), FREE) == pytest.approx(3.0)


def test_a_step_lasts_as_long_as_its_bytes_where_they_are_more() -> None:
    """Layers of equal size; no compute: the line never rests."""
    layers = [Layer(((1 << 18,),), 1.0, number) for number in range(1, 9)]
    size = 8 * 4 * (1 << 18)
    for kind, travels in (("ddp", 2.0), ("ddp, classic", 2.0), ("ZeRO-2", 2.0), ("ZeRO-3", 3.0)):
        found = step_s(kind, Training(layers, 1e-9, 4, 1), BYTE)
        assert found == pytest.approx(travels * size * 3 / 4), kind


def test_ddp_by_hand() -> None:
    """Two layers of one bucket each, forward 1 s and backward 2 s a layer, 3 s a reduction.

    Classic: forward until 2, backward of layer 1 until 4, its bucket is carried until 7; backward of layer 0
    until 6, its bucket is carried from 7 to 10. Crossing gains nothing: the next forward begins with layer 0.
    """
    layers = [Layer(((1 << 19,),), 1.0), Layer(((1 << 19,),), 1.0)]
    size = 4 * (1 << 19)
    costs = dataclasses.replace(FREE, byte_s=3.0 / size)
    training = Training(layers, 6.0, 2, 1)
    assert step_s("ddp, classic", training, costs) == pytest.approx(10.0)
    assert step_s("ddp", training, costs) == pytest.approx(10.0)
    embedded = [Layer(((1 << 19,),), 0.0), *layers]  # first to be needed, last to be there
    assert step_s("ddp", Training(embedded, 6.0, 2, 1), costs) > 6.0


def test_crossing_hides_what_classic_shows() -> None:
    costs = dataclasses.replace(FREE, byte_s=1e-8)
    size = train_models.payload(VGG).whole
    training = Training(VGG, size * costs.byte_s, 2, 4)
    crossing, classic = (step_s(kind, training, costs) for kind in ("ddp", "ddp, classic"))
    assert training.local_s <= crossing < classic <= 2.01 * training.local_s


@pytest.mark.parametrize("kind", PROGRAMS)
def test_bounds_hold(kind: str) -> None:
    """A step is never shorter than its work or its bytes, and never longer than both and all its calls."""
    costs = Costs(8e-9, 1e-4, 3e-4, 1e-10, 2e-10, 3e-10)
    for layers in (GPT, VGG):
        size = train_models.payload(layers).whole
        for hosts in (2, 4, 16):
            for local in (0.1, 1.0, 5.0):
                found = step_s(kind, Training(layers, local, hosts, 2), costs)
                line = 2 * size * (hosts - 1) / hosts * costs.byte_s
                assert max(local, line) <= found
                calls = 200 * (costs.call_s + 2 * hosts * costs.message_s)
                assert found <= local + 1.5 * line + calls + 6 * size * 3e-10
