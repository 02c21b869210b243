"""Placement of replicas on nodes that spreads a dead node's load evenly over the other nodes.

Clients read a dead node's chains from the other nodes of these chains. When the dead node returns,
it syncs from the same nodes. Therefore each pair of nodes should share equally many chains.
"""

import itertools
import math
import random
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fireflyer.fs3.manager.block_designs import Block, balanced_design, round_robin

MOVES_A_REPLICA = 400
"""Length of the search: number of attempted exchanges for each replica."""


@dataclass(frozen=True)
class Placement:
    """Chains over nodes.

    Attributes:
        chains: the nodes of each chain, all different, the head first.
        exact: True if the design is balanced by construction.
    """

    nodes: int
    chains: tuple[Block, ...]
    exact: bool

    def slots(self) -> list[list[tuple[int, int]]]:
        """Returns each chain's targets as (node, number of the target on that node, from 0)."""
        used = [itertools.count() for _ in range(self.nodes)]
        return [[(node, next(used[node])) for node in chain] for chain in self.chains]

    def pairs(self) -> npt.NDArray[np.int64]:
        """Returns [nodes, nodes]: number of chains that two nodes share; on the diagonal, the
        number of chains of a node."""
        shared = np.zeros((self.nodes, self.nodes), np.int64)
        for chain in self.chains:
            shared[np.ix_(chain, chain)] += 1
        return shared


@dataclass(frozen=True)
class Report:
    """Evenness of a placement.

    Attributes:
        smallest_pair, largest_pair: numbers of chains that two nodes share.
        smallest_share, largest_share: part of a dead node's traffic that falls on one other node;
            `fair_share` if it is the same for all.
    """

    smallest_pair: int
    largest_pair: int
    smallest_share: float
    largest_share: float
    fair_share: float


def place(nodes: int, targets: int, replicas: int, seed: int = 0) -> Placement:
    """Places as many chains of `replicas` nodes as possible; some targets may stay free.

    Raises:
        ValueError: there are fewer nodes than replicas, or no target.
    """
    if not 1 <= replicas <= nodes:
        raise ValueError(f"{replicas} replicas need as many nodes; there are {nodes}")
    if targets < 1:
        raise ValueError("a node needs at least one target")
    if replicas == 1 or replicas == nodes:
        alone: list[Block] = [(node,) for node in range(nodes)]
        if replicas == nodes:
            alone = [tuple(range(nodes))]
        return Placement(nodes, _rotate(alone * targets, nodes), exact=True)
    design = balanced_design(nodes, targets, replicas)
    if design is not None:
        return Placement(nodes, _rotate(design, nodes), exact=True)
    chosen = random.Random(f"{nodes} {targets} {replicas} {seed}")
    if replicas == 2 and nodes % 2 == 0:
        rounds = list(round_robin(nodes))
        chains = [pair for at in range(targets) for pair in rounds[at % (nodes - 1)]]
    else:
        chains = _Search(nodes, targets, replicas, chosen).best()
    return Placement(nodes, _rotate(chains, nodes), exact=False)


def report(placement: Placement) -> Report:
    """Measures the evenness of a placement; zeros for a single node."""
    n = placement.nodes
    if n == 1:
        return Report(0, 0, 0.0, 0.0, 0.0)
    pairs = placement.pairs()
    others = ~np.eye(n, dtype=bool)
    off = pairs[others].reshape(n, n - 1)
    share = off / np.maximum(off.sum(axis=1, keepdims=True), 1)
    return Report(
        int(off.min()), int(off.max()), float(share.min()), float(share.max()), 1 / (n - 1)
    )


def _rotate(chains: list[Block], nodes: int) -> tuple[Block, ...]:
    """Rotates each chain so that all nodes are the head about equally often."""
    heads = [0] * nodes
    turned = []
    for chain in chains:
        at = min(range(len(chain)), key=lambda at: (heads[chain[at]], at))
        turned.append(chain[at:] + chain[:at])
        heads[chain[at]] += 1
    return tuple(turned)


class _Search:
    """Search that exchanges nodes between chains to make the pair counts more even.

    The search minimizes the sum of the squared counts by simulated annealing.
    """

    def __init__(self, nodes: int, targets: int, replicas: int, chosen: random.Random) -> None:
        self._nodes, self._targets, self._replicas = nodes, targets, replicas
        self._random = chosen
        self._pairs = [[0] * nodes for _ in range(nodes)]
        self._chains: list[list[int]] = []

    def best(self) -> list[Block]:
        self._begin()
        total = sum(map(sum, self._pairs)) // 2
        count = self._nodes * (self._nodes - 1) // 2
        low, more = divmod(total, count)
        goal = more * (low + 1) ** 2 + (count - more) * low**2  # lower bound of the sum
        now = sum(x * x for row in self._pairs for x in row) // 2
        best, kept = now, [tuple(chain) for chain in self._chains]
        moves = MOVES_A_REPLICA * len(self._chains) * self._replicas
        for move in range(moves):
            if best == goal:
                break
            heat = 2.0 * (1 - move / moves) ** 2 + 1e-9
            change = self._try(heat)
            now += change
            if now < best:
                best, kept = now, [tuple(chain) for chain in self._chains]
        return kept

    def _begin(self) -> None:
        """Makes an initial placement: each chain takes the nodes with the most free targets."""
        free = [self._targets] * self._nodes
        for _ in range(self._nodes * self._targets // self._replicas):
            order = sorted(range(self._nodes), key=lambda n: (-free[n], self._random.random()))
            chain = order[: self._replicas]
            for node in chain:
                free[node] -= 1
            for a, b in itertools.permutations(chain, 2):
                self._pairs[a][b] += 1
            self._chains.append(chain)

    def _try(self, heat: float) -> int:
        """Tries to exchange a node of one chain for a node of another chain.

        Returns the change of the sum of squares; 0 if the exchange was impossible or undone.
        """
        one, other = self._random.sample(self._chains, 2)
        i, j = self._random.randrange(len(one)), self._random.randrange(len(other))
        a, b = one[i], other[j]
        if a in other or b in one:
            return 0
        change = self._swap(one, i, other, j)
        if change <= 0 or self._random.random() < math.exp(-change / heat):
            return change
        self._swap(one, i, other, j)
        return 0

    def _swap(self, one: list[int], i: int, other: list[int], j: int) -> int:
        a, b = one[i], other[j]
        change = 0
        for chain, at, out, into in ((one, i, a, b), (other, j, b, a)):
            for node in chain:
                if node != out:
                    change += self._add(out, node, -1) + self._add(into, node, 1)
            chain[at] = into
        return change

    def _add(self, a: int, b: int, by: int) -> int:
        before = self._pairs[a][b]
        self._pairs[a][b] = self._pairs[b][a] = before + by
        return (before + by) ** 2 - before**2
