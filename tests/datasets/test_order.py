"""The order: a permutation whatever n, unlike any other, and the same for ever."""

import os
from collections import Counter
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.draws import cases

from fireflyer.datasets.order import ORDER_VERSION, Order

SEEDS = st.integers(0, 2**64 - 1)

GOLDEN_SMALL = [6, 7, 1, 9, 0, 5, 4, 3, 2, 8]
GOLDEN_BLOCK = [6, 5, 4, 7, 1, 3, 2, 0, 12, 10, 8, 9, 11]
GOLDEN_HUGE = [411189373727336, 565310930952403, 976277648559408, 754770225282393]
GOLDEN_HUGE_BLOCK = [515754948328762, 515754948329746, 515754948326425, 515754948327625]
GOLDEN_DIGEST = "260b7056a32e3d8edd81201256bc0882d7b92a85f22992934fd6003fdfbbc390"

LONG = bool(os.environ.get("FIREFLYER_SOAK"))
POWERS = (2**10 - 1, 2**10, 2**10 + 1, 2**12 + 1)
SMALL = (
    (*range(300), *range(1000, 1100), 2**12 - 1, 2**12, *POWERS) if LONG else (*range(100), *POWERS)
)


def whole(
    n: int, seed: int, epoch: int, block: int | None
) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    return Order(n, seed, epoch, True, block).span(0, n)


@pytest.mark.parametrize("block", [None, 1, 7])
def test_every_small_n_is_a_permutation(block: int | None) -> None:
    for n in SMALL:
        order = whole(n, 5, 6, block)
        assert np.array_equal(np.sort(order), np.arange(n)), n


@settings(deadline=None, max_examples=cases(100))
@given(
    n=st.integers(0, 5_000),
    seed=SEEDS,
    epoch=SEEDS,
    block=st.one_of(st.none(), st.integers(1, 6_000)),
)
def test_any_order_is_a_permutation(n: int, seed: int, epoch: int, block: int | None) -> None:
    assert np.array_equal(np.sort(whole(n, seed, epoch, block)), np.arange(n))


@settings(deadline=None, max_examples=cases(100))
@given(
    n=st.integers(1, 2**62 - 1),
    seed=SEEDS,
    block=st.one_of(st.none(), st.integers(1, 2**40)),
    data=st.data(),
)
def test_huge_orders_stay_in_range_and_do_not_collide(
    n: int, seed: int, block: int | None, data: st.DataObject
) -> None:
    positions = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=50, unique=True))
    order = Order(n, seed, 0, True, block)
    samples = order.at(np.array(positions)).tolist()
    assert len(set(samples)) == len(positions)
    assert all(0 <= sample < n for sample in samples)
    # A position by itself is what it is in a batch.
    assert [int(order.at(np.array([p]))[0]) for p in positions[:5]] == samples[:5]


def test_values_of_version_1_never_change() -> None:
    assert ORDER_VERSION == 1
    assert whole(10, 0, 0, None).tolist() == GOLDEN_SMALL
    assert whole(13, 1, 2, 4).tolist() == GOLDEN_BLOCK
    huge = Order(10**15, 2**64 - 1, 7).span(10**9, 10**9 + 4)
    assert huge.tolist() == GOLDEN_HUGE
    blocked = Order(10**15 + 1, 3, 7, True, 5000).span(10**9, 10**9 + 4)
    assert blocked.tolist() == GOLDEN_HUGE_BLOCK
    digest = sha256()
    for n, block in ((1024, None), (1025, None), (100_003, None), (1025, 64), (100_003, 2048)):
        digest.update(whole(n, 42, 3, block).astype("<i8").tobytes())
    assert digest.hexdigest() == GOLDEN_DIGEST


def test_all_permutations_of_four_come_equally_often() -> None:
    count = Counter(tuple(whole(4, seed, 0, None).tolist()) for seed in range(12_000))
    assert len(count) == 24
    chi = sum((seen - 500) ** 2 / 500 for seen in count.values())
    assert chi < 58  # 23 degrees of freedom: exceeded once in 10,000 times


@pytest.mark.parametrize("n", [2000, 4099])
def test_the_network_mixes(n: int) -> None:
    """Where a sample goes, and what follows it, is as even as chance makes it; 8 x 8 cells each."""
    where = np.zeros((8, 8))
    next_to = np.zeros((8, 8))
    rounds = 40
    for seed in range(rounds):
        order = whole(n, seed, 1, None)
        cells = order * 8 // n
        np.add.at(where, (np.arange(n) * 8 // n, cells), 1)
        np.add.at(next_to, (cells[:-1], cells[1:]), 1)
    for table in (where, next_to):
        expected = table.sum() / 64
        # Without replacement the spread is below that of 63 degrees of freedom (1 in 10,000: 112).
        assert ((table - expected) ** 2 / expected).sum() < 112
    fixed = sum(int((whole(n, seed, 2, None) == np.arange(n)).sum()) for seed in range(200))
    assert 130 < fixed < 280  # one a permutation on average


def test_neighbouring_seeds_and_epochs_share_nothing() -> None:
    base = whole(5000, 9, 9, None)
    for other in (whole(5000, 10, 9, None), whole(5000, 9, 10, None), whole(5000, 9, 9, 64)):
        assert int((base == other).sum()) < 15  # one on average


def test_blocks_stay_together_and_are_shuffled_inside() -> None:
    n, block = 1003, 10
    order = whole(n, 1, 1, block)
    runs = []
    at = 0
    while at < n:
        run = order[at] // block
        length = min(block, n - run * block)
        piece = order[at : at + length]
        assert sorted(piece.tolist()) == list(range(run * block, run * block + length))
        runs.append(int(run))
        at += length
    assert sorted(runs) == list(range(101))
    assert runs != sorted(runs)
    places = {whole(n, seed, 1, block).tolist().index(1000) // 10 for seed in range(60)}
    assert len(places) > 30, "the short run has no fixed place"
    inside = {tuple((order[i : i + 10] % 10).tolist()) for i in range(0, runs.index(100) * 10, 10)}
    assert len(inside) == runs.index(100), "each run has an order of its own"


def test_without_shuffle_nothing_moves() -> None:
    assert Order(9, 1, 2, shuffle=False).span(3, 9).tolist() == [3, 4, 5, 6, 7, 8]


def test_positions_and_arguments_are_checked() -> None:
    order = Order(10, 0, 0)
    assert order.at(np.array([[0, 1], [2, 3]])).shape == (2, 2)
    for bad in (-1, 10):
        with pytest.raises(IndexError, match=r"outside \[0, 10\)"):
            order.at(np.array([bad]))
    for arguments in ((-1, 0, 0), (2**62, 0, 0), (1, -1, 0), (1, 0, 2**64)):
        with pytest.raises(ValueError, match=r"expected values|positions"):
            Order(*arguments)
    with pytest.raises(ValueError, match="block"):
        Order(1, 0, 0, True, 0)
