"""Costs of communication between hosts, figures drawn from them, and a small run in the lab."""

import dataclasses

import pytest

from fireflyer.bench.harness.report import Row
from fireflyer.bench.scaling import benchmark as scaling
from fireflyer.bench.scaling.costs import Costs
from fireflyer.bench.train import models
from fireflyer.lab import namespaces

GPT = models.gpt_layers(models.Sizes())
VGG = models.vgg_layers(models.Sizes())


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


LAB = Costs(8.4e-9, 6e-4, 3e-4, 1.5e-10, 2e-10, 3e-10)


def test_the_error_is_that_of_the_model_either_way() -> None:
    over, under = (
        Row.of_errors("case", ("model", seconds), ("lab", 1.0), 10.0) for seconds in (1.05, 0.88)
    )
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
