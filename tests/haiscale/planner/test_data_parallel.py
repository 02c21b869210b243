"""Steps of data-parallel training: hand-computed programs, and bounds that must hold."""

import pytest

from fireflyer.bench.train import models
from fireflyer.haiscale.planner.data_parallel import (
    PROGRAMS,
    Prices,
    Training,
    ddp,
    steady_s,
    step_s,
)
from fireflyer.haiscale.planner.overlap import (
    Compute,
    Instruction,
    Start,
    StepEnds,
    Wait,
    simulate,
)

MEGABYTES_2 = 2 << 20  # a bucket
GPT = models.gpt_layers(models.Sizes())
VGG = models.vgg_layers(models.Sizes())


def ring(hosts: int, byte_s: float, call_s: float = 0.0, **others: float) -> Prices:
    """Returns the times of rings of `hosts` hosts."""
    share = (hosts - 1) / hosts * byte_s
    return Prices(
        lambda size: call_s + 2 * size * share, lambda size: call_s + size * share, **others
    )


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


@pytest.mark.parametrize("kind", PROGRAMS)
def test_without_communication_a_step_is_its_work(kind: str) -> None:
    for layers in (GPT, VGG, models.even_layers(models.Sizes())):
        assert step_s(kind, Training(layers, 3.0, 8), ring(4, 0.0)) == pytest.approx(3.0)


def test_a_step_lasts_as_long_as_its_bytes_where_they_are_more() -> None:
    """Layers of equal size; no compute: the line never rests."""
    layers = [models.Layer(((1 << 18,),), 1.0, number) for number in range(1, 9)]
    size = 8 * 4 * (1 << 18)
    for kind, travels in (
        ("ddp", 2.0),
        ("ddp, synchronous", 2.0),
        ("ZeRO-2", 2.0),
        ("ZeRO-3", 3.0),
    ):
        found = step_s(kind, Training(layers, 1e-9, 4), ring(4, 1.0))
        assert found == pytest.approx(travels * size * 3 / 4), kind


def test_ddp_by_hand() -> None:
    """Two layers of one bucket each, forward 1 s and backward 2 s a layer, 3 s a reduction.

    Synchronous: forward until 2, backward of layer 1 until 4, its bucket is carried until 7; backward of
    layer 0 until 6, its bucket is carried from 7 to 10. Deferred gains nothing: the next forward begins
    with layer 0.
    """
    layers = [models.Layer(((1 << 19,),), 1.0), models.Layer(((1 << 19,),), 1.0)]
    prices = ring(2, 3.0 / MEGABYTES_2)
    training = Training(layers, 6.0, 2)
    assert step_s("ddp, synchronous", training, prices) == pytest.approx(10.0)
    assert step_s("ddp", training, prices) == pytest.approx(10.0)
    embedded = [models.Layer(((1 << 19,),), 0.0), *layers]  # first to be needed, last to be there
    assert step_s("ddp", Training(embedded, 6.0, 2), prices) > 6.0


def test_crossing_hides_what_classic_shows() -> None:
    prices = ring(2, 1e-8)
    training = Training(VGG, models.payload(VGG).whole * 1e-8, 8)
    defers, synchronous = (step_s(kind, training, prices) for kind in ("ddp", "ddp, synchronous"))
    assert training.local_s <= defers < synchronous <= 2.01 * training.local_s


@pytest.mark.parametrize("kind", PROGRAMS)
def test_bounds_hold(kind: str) -> None:
    """A step is never shorter than its work or its bytes, and never longer than both and all its calls."""
    for layers in (GPT, VGG):
        size = models.payload(layers).whole
        for hosts in (2, 4, 16):
            for local in (0.1, 1.0, 5.0):
                prices = ring(hosts, 8e-9, 5e-4, copy_byte_s=2e-10, optimizer_byte_s=3e-10)
                found = step_s(kind, Training(layers, local, 2 * hosts), prices)
                line = 2 * size * (hosts - 1) / hosts * 8e-9
                assert max(local, line) <= found
                calls = 200 * 5e-4
                assert found <= local + 1.5 * line + calls + 6 * size * 3e-10


def test_gradients_of_earlier_micro_batches_only_add_up() -> None:
    layers = [models.Layer(((1 << 19,),), 1.0)] * 2
    training, prices = Training(layers, 6.0, 2), ring(2, 3.0 / MEGABYTES_2)
    for deferred, end in ((False, 10.0), (True, 10.0)):
        program = ddp(training, prices, deferred, before_s=12.0)
        assert steady_s(program) == pytest.approx(12.0 + end)
