"""Replicas of experts: what every placement must be, and how even the loads become."""

from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.errors import ConfigError
from fireflyer.haiscale.expert import Placement, rebalance_experts


def loads_of(weight: torch.Tensor, placement: Placement, devices: int) -> torch.Tensor:
    """Load of each device, (layers, devices), when replicas share an expert's load equally."""
    shares = (weight.double() / placement.logcnt).gather(1, placement.phy2log)
    return shares.view(len(shares), devices, -1).sum(2)


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, int, int, int, int]:
    nodes, per_node = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    groups, of_group = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    gpus, experts = nodes * per_node, groups * of_group
    replicas = -(-experts // gpus) * gpus + gpus * draw(st.integers(0, 3))
    kinds = st.one_of(st.integers(0, 5).map(float), st.floats(0, 1e6))
    rows = st.lists(kinds, min_size=experts, max_size=experts)
    weight = torch.tensor(draw(st.lists(rows, min_size=1, max_size=2)), dtype=torch.float64)
    return weight, replicas, groups, nodes, gpus


@given(cases())
def test_every_placement_is_whole(case: tuple[torch.Tensor, int, int, int, int]) -> None:
    weight, replicas, groups, nodes, _ = case
    placement = rebalance_experts(*case)
    layers, experts = weight.shape
    assert placement.phy2log.shape == (layers, replicas)
    for layer in range(layers):
        slots = placement.phy2log[layer].tolist()
        for expert in range(experts):
            mine = [slot for slot in range(replicas) if slots[slot] == expert]
            assert len(mine) == placement.logcnt[layer, expert] >= 1
            row = placement.log2phy[layer, expert].tolist()
            assert row == mine + [-1] * (len(row) - len(mine))
        if groups % nodes == 0:
            of_group, of_node = experts // groups, replicas // nodes
            homes: dict[int, set[int]] = {}
            for slot, expert in enumerate(slots):
                homes.setdefault(expert // of_group, set()).add(slot // of_node)
            assert all(len(home) == 1 for home in homes.values()), "a group lies on one node"
    again = rebalance_experts(*case)
    assert all(torch.equal(one, two) for one, two in zip(placement, again, strict=True))


@given(st.lists(st.integers(0, 30), min_size=2, max_size=4), st.integers(0, 4))
def test_no_counts_make_the_heaviest_replica_lighter(loads: list[int], spare: int) -> None:
    def least(rest: list[int], slots: int) -> float:
        if len(rest) == 1:
            return rest[0] / slots
        choices = range(1, slots - len(rest) + 2)
        return min(max(rest[0] / n, least(rest[1:], slots - n)) for n in choices)

    slots = len(loads) + spare
    placement = rebalance_experts(torch.tensor([loads]), slots, 1, 1, 1)
    heaviest = max(n / int(c) for n, c in zip(loads, placement.logcnt[0], strict=True))
    assert heaviest == pytest.approx(least(loads, slots))


@pytest.mark.parametrize("replicas", [72, 96])
def test_zipf_loads_become_even(replicas: int) -> None:
    worst = 0.0
    for seed in range(100):
        loads = 1 / numpy.arange(1, 65)
        numpy.random.default_rng(seed).shuffle(loads)
        weight = torch.from_numpy(loads)[None]
        placement = rebalance_experts(weight, replicas, 8, 1, 8)
        devices = loads_of(weight, placement, 8)
        bound = max(float(devices.mean()), float((weight / placement.logcnt).max()))
        worst = max(worst, float(devices.max()) / bound)
    assert worst <= 1.01


def test_nodes_get_even_loads_of_whole_groups() -> None:
    weight = torch.tensor([[9.0, 1, 1, 9, 5, 5, 5, 5]])
    placement = rebalance_experts(weight, 8, 4, 2, 4)
    assert loads_of(weight, placement, 2).tolist() == [[20, 20]]
    assert loads_of(weight, placement, 4).max() <= 10


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((72, 8, 1, 7), "num_gpus 7 does not divide num_replicas 72"),
        ((72, 8, 3, 8), "num_nodes 3 does not divide num_gpus 8"),
        ((72, 7, 1, 8), "num_groups 7 does not divide the number of experts 64"),
        ((56, 8, 1, 8), "at least one for each of 64 experts"),
        ((72, 8, 0, 8), "invalid num_nodes 0"),
        ((72, 8, 1, 8.0), "invalid num_gpus 8.0: expected an integer"),
    ],
)
def test_counts_that_do_not_divide(arguments: tuple[Any, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        rebalance_experts(torch.ones(1, 64), *arguments)


def test_loads_that_are_none() -> None:
    for weight in (torch.tensor([[1.0, float("nan")]]), torch.tensor([[1.0, -1.0]])):
        with pytest.raises(ConfigError, match="finite loads"):
            rebalance_experts(weight, 2, 1, 1, 1)
    with pytest.raises(ConfigError, match=r"\(layers, experts\)"):
        rebalance_experts(torch.ones(4), 4, 1, 1, 1)
