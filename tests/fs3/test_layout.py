"""Where chunks are: the vectors that every implementation must give, bijection, spread."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.fs3.layout import Layout, chain_of, chains_of, chunk_id, permute

VECTORS = Path(__file__).with_name("layout_vectors.json")


def reference(seed: int, n: int, x: int) -> int:
    """P(x) word by word as docs/guide/fs3.md has it."""
    b = 1
    while 4**b < n:
        b += 1

    def mix(z: int) -> int:
        z = z % 2**64
        z = z ^ (z >> 30)
        z = (z * 0xBF58476D1CE4E5B9) % 2**64
        z = z ^ (z >> 27)
        z = (z * 0x94D049BB133111EB) % 2**64
        return z ^ (z >> 31)

    def walk(x: int) -> int:
        left, right = x >> b, x % (1 << b)
        for r in range(4):
            left, right = (
                right,
                left ^ (mix(seed + (r + 1) * 0x9E3779B97F4A7C15 + right) % (1 << b)),
            )
        return (left << b) | right

    x = walk(x)
    while x >= n:
        x = walk(x)
    return x


def vectors() -> list[dict[str, Any]]:
    """What layout_vectors.json holds: seeds and lengths at the edges, and some random ones."""
    chosen = random.Random(229)
    seeds = [0, 1, 2**63, 2**64 - 1, *(chosen.getrandbits(64) for _ in range(4))]
    cases = []
    for seed in seeds:
        for n in (1, 2, 3, 4, 5, 16, 17, 100, 1000, 4096, 65537):
            xs = list(range(n)) if n <= 17 else sorted(chosen.sample(range(n), 12))
            order = [reference(seed, n, x) for x in xs]
            cases.append({"seed": f"{seed:#018x}", "n": n, "x": xs, "p": order})
    return cases


def test_the_vectors() -> None:
    stored = json.loads(VECTORS.read_text())
    assert stored == vectors()
    for case in stored:
        seed = int(case["seed"], 16)
        assert [permute(seed, case["n"], x) for x in case["x"]] == case["p"]


@given(seed=st.integers(0, 2**64 - 1), n=st.integers(1, 700))
def test_a_permutation_for_every_seed_and_length(seed: int, n: int) -> None:
    assert sorted(permute(seed, n, x) for x in range(n)) == list(range(n))


@given(
    seed=st.integers(0, 2**64 - 1),
    stripe=st.integers(1, 40),
    more=st.integers(0, 40),
    indexes=st.lists(st.integers(0, 2**32 - 1), max_size=90),
)
def test_many_at_once_are_the_same_as_one_by_one(
    seed: int, stripe: int, more: int, indexes: list[int]
) -> None:
    table = [7 * at + 3 for at in range(stripe + more)]
    layout = Layout(1, 1, 1 << 20, stripe, seed)
    many = chains_of(layout, table, np.array(indexes, np.int64))
    assert many.tolist() == [chain_of(layout, table, index) for index in indexes]


def test_a_file_uses_as_many_chains_as_its_stripe_evenly() -> None:
    layout = Layout(1, 1, 1 << 20, 5, 99)
    used = Counter(chain_of(layout, range(20), index) for index in range(50))
    assert sorted(used.values()) == [10] * 5


@pytest.mark.sample(2)
@pytest.mark.parametrize("n", [3, 8, 16, 100])
@pytest.mark.parametrize("x", [0, 1, 2])
def test_files_spread_over_the_chains(n: int, x: int) -> None:
    """The busiest chain has at most a tenth more than its share of the files' chunks `x`."""
    chosen = random.Random(x)
    files = 2000 * n
    used = Counter(permute(chosen.getrandbits(64), n, x) for _ in range(files))
    assert max(used.values()) < 1.1 * files / n
    assert min(used.values()) > 0.9 * files / n


def test_chunk_ids_sort_by_inode_and_index() -> None:
    assert chunk_id(1, 2) == bytes.fromhex("00000000000000010000000200000000")
    assert chunk_id(1, 2**32 - 1) < chunk_id(2, 0)


def test_what_no_layout_can_be() -> None:
    for size in (0, 2048, 12288, 128 << 20):
        with pytest.raises(ValueError, match="power of two"):
            Layout(1, 1, size, 1, 0)
    with pytest.raises(ValueError, match="at least 1"):
        Layout(1, 1, 4096, 0, 0)
    with pytest.raises(ValueError, match="64 bits"):
        Layout(1, 1, 4096, 1, 2**64)
    layout = Layout(1, 1, 4096, 3, 0)
    with pytest.raises(ValueError, match="stripe of 3 chains is wider than the table of 2"):
        chain_of(layout, [1, 2], 0)
    with pytest.raises(ValueError, match="no chunk -1"):
        chain_of(layout, [1, 2, 3], -1)
    with pytest.raises(ValueError, match="no chunk -1"):
        chains_of(layout, [1, 2, 3], np.array([0, -1]))
    with pytest.raises(ValueError, match="expected 0 to 2"):
        permute(0, 3, 3)
