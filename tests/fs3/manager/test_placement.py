"""Placements are valid for every shape of cluster, and as even as designs or search can make them."""

import itertools
from collections import Counter

import pytest

from fireflyer.fs3.manager.block_designs import Field, balanced_design, round_robin
from fireflyer.fs3.manager.placement import Placement, place, report


def check(placement: Placement, nodes: int, targets: int, replicas: int) -> None:
    """What every placement must be."""
    assert len(placement.chains) == nodes * targets // replicas
    load = Counter(node for chain in placement.chains for node in chain)
    for chain in placement.chains:
        assert len(set(chain)) == replicas
        assert all(0 <= node < nodes for node in chain)
    assert max(load.values()) <= targets
    taken = [slot for slots in placement.slots() for slot in slots]
    assert len(set(taken)) == len(taken)
    assert all(number < targets for _, number in taken)


@pytest.mark.sample(1)
@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 5])
def test_every_small_cluster(replicas: int) -> None:
    for nodes, targets in itertools.product(range(replicas, 13), range(1, 9)):
        placement = place(nodes, targets, replicas)
        check(placement, nodes, targets, replicas)
        whole = nodes * targets % replicas == 0
        if whole and replicas > 1:
            even = report(placement)
            assert even.largest_pair - even.smallest_pair <= (0 if placement.exact else 2), (
                f"{nodes} nodes, {targets} targets, {replicas} replicas: {even}"
            )


@pytest.mark.parametrize(
    ("nodes", "targets", "replicas"),
    [
        (4, 3, 2),  # all pairs
        (9, 8, 2),
        (7, 3, 3),  # projective planes of order 2, 3, 4, 7, 8, 9
        (13, 4, 4),
        (21, 5, 5),
        (57, 8, 8),
        (73, 9, 9),
        (91, 10, 10),
        (9, 4, 3),  # affine planes of order 3, 4, 5, 9
        (16, 5, 4),
        (25, 12, 5),
        (81, 10, 9),
        (15, 7, 3),  # Bose
        (27, 13, 3),
        (13, 6, 3),  # difference families
        (31, 15, 3),
        (11, 5, 5),
        (37, 9, 9),
        (6, 10, 3),  # all subsets
    ],
)
def test_designs_are_balanced(nodes: int, targets: int, replicas: int) -> None:
    placement = place(nodes, targets, replicas)
    check(placement, nodes, targets, replicas)
    even = report(placement)
    assert placement.exact
    assert even.smallest_pair == even.largest_pair == targets * (replicas - 1) // (nodes - 1)
    assert even.smallest_share == even.largest_share == pytest.approx(even.fair_share)


def test_where_no_design_can_be_there_is_none() -> None:
    assert balanced_design(8, 3, 3) is None  # 6 partners cannot be spread over 7 nodes evenly
    assert balanced_design(22, 7, 7) is None  # divides, and is excluded by Bruck, Ryser and Chowla


def test_a_round_robin_meets_everybody_once() -> None:
    rounds = list(round_robin(10))
    met = Counter(frozenset(pair) for one in rounds for pair in one)
    assert len(rounds) == 9
    assert set(met.values()) == {1}
    assert len(met) == 45


@pytest.mark.parametrize(("nodes", "targets"), [(10, 4), (180, 16), (7, 4), (50, 60)])
def test_pairs_differ_by_one_at_most(nodes: int, targets: int) -> None:
    placement = place(nodes, targets, 2)
    check(placement, nodes, targets, 2)
    assert report(placement).largest_pair - report(placement).smallest_pair <= 1


def test_search_on_a_larger_cluster_is_nearly_even() -> None:
    placement = place(20, 16, 3)
    check(placement, 20, 16, 3)
    even = report(placement)
    assert not placement.exact
    assert (even.smallest_pair, even.largest_pair) == (1, 2)
    assert even.largest_share < 1.5 * even.fair_share


def test_heads_are_spread() -> None:
    for shape in ((7, 3, 3), (10, 6, 3), (5, 9, 3)):
        heads = Counter(chain[0] for chain in place(*shape).chains)
        share = len(place(*shape).chains) / shape[0]
        assert max(heads.values()) <= share + 1


def test_a_seed_decides() -> None:
    assert place(12, 7, 4, seed=3) == place(12, 7, 4, seed=3)


def test_impossible_clusters() -> None:
    with pytest.raises(ValueError, match="3 replicas need as many nodes"):
        place(2, 4, 3)
    with pytest.raises(ValueError, match="at least one target"):
        place(3, 0, 3)


@pytest.mark.parametrize("q", [2, 3, 4, 5, 7, 8, 9])
def test_finite_fields(q: int) -> None:
    field = Field.of(q)
    assert field is not None
    numbers = range(q)
    for a, b, c in itertools.product(numbers, repeat=3):
        times, plus = field.multiply, field.add
        assert times[a][plus[b][c]] == plus[times[a][b]][times[a][c]]
        assert times[times[a][b]][c] == times[a][times[b][c]]
    assert all(sorted(row) == list(numbers) for row in field.multiply[1:])
    assert Field.of(6) is None
