"""Which children a stage gets, and which ranks a group."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from fireflyer.errors import ConfigError
from fireflyer.haiscale.pipeline import partition
from fireflyer.haiscale.pipeline.placement import grid
from fireflyer.haiscale.pipeline.stages import even


def net() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))


def test_stages_keep_the_names_of_the_whole() -> None:
    whole = net()
    names = [[*partition(whole, rank, 3, balance=[1, 2, 3]).state_dict()] for rank in range(3)]
    assert [*itertools.chain(*names)] == [*whole.state_dict()]
    assert names[1][0] == "1.weight"
    first, second = partition(whole, 1, 2, num_model_chunks=2, balance=[1, 1, 2, 2])
    assert (first.index, second.index) == (1, 3)
    assert next(iter(second.state_dict())) == "4.weight"


def test_balance_makes_the_largest_stage_as_small_as_possible() -> None:
    costs = [5.0, 1.0, 1.0, 7.0, 2.0, 2.0, 0.0]
    for parts in range(1, len(costs) + 1):
        sizes = even(costs, parts)
        assert sum(sizes) == len(costs)
        assert min(sizes) > 0

        def largest(cuts: tuple[int, ...]) -> float:
            edges = (0, *cuts, len(costs))
            return max(sum(costs[a:b]) for a, b in itertools.pairwise(edges))

        best = min(map(largest, itertools.combinations(range(1, len(costs)), parts - 1)))
        assert largest(tuple(itertools.accumulate(sizes[:-1]))) == best


def test_balance_by_time_measures_the_sample() -> None:
    stage = partition(net(), 0, 2, balance="time", sample=torch.ones(1, 4))
    assert sum(stage.sizes) == 6
    assert min(stage.sizes) > 0


def test_tied_parameters_are_found() -> None:
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.weight = one.weight
    stage = partition(nn.Sequential(one, nn.ReLU(), other), 1, 2, balance=[2, 1])
    assert stage.tied == (((0, "0.weight"), (1, "2.weight")),)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"module": nn.Linear(2, 2)}, "invalid module .*expected a torch.nn.Sequential"),
        ({"balance": [3, 2]}, "invalid balance .*the sum 6"),
        ({"balance": [6]}, "invalid balance .*expected 2 numbers"),
        ({"balance": [0, 6]}, "invalid balance"),
        ({"balance": 3}, "invalid balance 3 .*expected 2 numbers"),
        ({"balance": "luck"}, "invalid balance 'luck'"),
        ({"balance": "time"}, "needs sample="),
        ({"rank": 2}, "invalid rank 2 .*0 to 1"),
        ({"size": 7}, "fewer than 7 stages"),
        ({"num_model_chunks": 0}, "invalid num_model_chunks 0"),
    ],
)
def test_invalid_arguments_are_named(options: dict[str, Any], words: str) -> None:
    arguments: dict[str, Any] = {"module": net(), "rank": 0, "size": 2, **options}
    with pytest.raises(ConfigError, match=words):
        partition(**arguments)


def test_staggered_hosts_hold_one_stage_and_compact_hosts_a_pipeline() -> None:
    staggered = grid(16, 2)
    assert staggered["pp"][0] == [0, 8]
    assert staggered["dp"] == [[*range(8)], [*range(8, 16)]]
    compact = grid(16, 2, placement="compact")
    assert compact["pp"][0] == [0, 1]
    assert compact["dp"][0] == [*range(0, 16, 2)]


def test_every_rank_is_in_one_group_of_each_kind() -> None:
    for placement in ("staggered", "compact"):
        for rows in grid(48, 4, 2, 3, placement).values():
            assert sorted(itertools.chain(*rows)) == [*range(48)]
    assert grid(48, 4, 2, 3)["tp"][0] == [0, 1]
    assert all(len(row) == 3 for row in grid(48, 4, 2, 3)["ep"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pp_size": 3}, "does not divide the 8 ranks"),
        ({"pp_size": 2, "ep_size": 3}, "invalid ep_size 3"),
        ({"pp_size": 0}, "invalid pp_size 0"),
        ({"pp_size": 2, "placement": "spread"}, "invalid placement 'spread'"),
    ],
)
def test_invalid_sizes_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        grid(8, **options)
