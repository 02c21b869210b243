"""The pure core of the memory tier: the buddy map, what a keeper keeps, and a simulation of lost nodes."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.checkpoint.memory.inventory import (
    Complete,
    Entry,
    Inventory,
    ReplicaTable,
    Stamp,
    buddies,
    newest_complete,
)
from fireflyer.errors import CheckpointError, NoSpace

MANY = 1 << 40


def _table(limit: int = MANY) -> ReplicaTable:
    table = ReplicaTable()
    table.limit_bytes = limit
    return table


def _keep(table: ReplicaTable, stamp: Stamp, rank: int, size: int = 10, world: int = 2) -> None:
    table.reserve(stamp, rank, size)
    table.hold(stamp, world, rank)


@given(st.integers(0, 200))
def test_every_node_has_one_buddy_and_is_one(nodes: int) -> None:
    found = buddies(nodes)
    if nodes < 2:
        assert found == (None,) * nodes
        return
    assert sorted(buddy for buddy in found if buddy is not None) == list(range(nodes))
    assert all(buddy != node for node, buddy in enumerate(found))


@pytest.mark.parametrize(("nodes", "fatal"), [(2, 1), (3, 3), (4, 2), (7, 5), (8, 4)])
def test_few_pairs_of_lost_nodes_are_fatal(nodes: int, fatal: int) -> None:
    found = buddies(nodes)
    pairs = {frozenset((node, buddy)) for node, buddy in enumerate(found)}
    assert len(pairs) == fatal


def test_a_save_is_complete_with_a_mark_and_all_ranks() -> None:
    old, new = Stamp(1, 1, 10), Stamp(1, 2, 5)  # newer by number, though of an older step

    def entry(stamp: Stamp, committed: bool, *ranks: int) -> Entry:
        return Entry(stamp=stamp, world=2, committed=committed, ranks=ranks)

    whole = Inventory(entries=(entry(old, True, 0, 1), entry(new, False, 0, 1)))
    assert newest_complete([]) is None
    assert newest_complete([Inventory(), Inventory(entries=(entry(new, True, 0),))]) is None
    assert newest_complete([whole]) == Complete(stamp=old, holders=((0,), (0,)), marked=(0,))
    marked = Inventory(entries=(entry(new, True),))
    assert newest_complete([whole, marked]) == Complete(
        stamp=new, holders=((0,), (0,)), marked=(1,)
    )


def test_an_old_save_goes_when_the_new_one_is_committed_and_not_before() -> None:
    table = _table(limit=40)
    for rank in (0, 1):
        _keep(table, Stamp(1, 1, 1), rank)
    assert table.commit(Stamp(1, 1, 1), 2) == []
    for rank in (0, 1):
        _keep(table, Stamp(1, 2, 2), rank)
    assert table.used_bytes == 40
    assert table.commit(Stamp(1, 2, 2), 2) == [Stamp(1, 1, 1)]
    assert table.used_bytes == 20
    assert table.commit(Stamp(1, 1, 1), 2) == []  # a late mark changes nothing
    assert [entry.stamp for entry in table.inventory().entries] == [Stamp(1, 2, 2)]


def test_what_failed_makes_room_for_the_next() -> None:
    table = _table(limit=20)
    _keep(table, Stamp(1, 1, 1), 0)
    assert table.reserve(Stamp(1, 2, 2), 0, 20) == [Stamp(1, 1, 1)]
    with pytest.raises(NoSpace, match="limit of 20 bytes"):
        table.reserve(Stamp(1, 2, 2), 1, 1)
    table.release(Stamp(1, 2, 2), 0)
    table.reserve(Stamp(1, 2, 2), 1, 1)


def test_the_same_data_again_needs_no_room() -> None:
    table = _table(limit=10)
    for _ in range(3):
        _keep(table, Stamp(1, 1, 1), 0)
    assert table.used_bytes == 10


def test_a_replaced_run_changes_nothing() -> None:
    table = _table()
    table.reserve(Stamp(1, 1, 1), 0, 10)
    table.raise_fence(2)
    for act in (
        lambda: table.reserve(Stamp(1, 2, 2), 0, 10),
        lambda: table.hold(Stamp(1, 1, 1), 1, 0),
        lambda: table.place(Stamp(1, 1, 1), 1, 0, ""),
        lambda: table.commit(Stamp(1, 1, 1), 1),
        lambda: table.raise_fence(1),
    ):
        with pytest.raises(CheckpointError, match="a later run"):
            act()
    assert table.inventory() == Inventory()
    table.raise_fence(0)  # does not know its epoch yet


def test_rank_0_learns_who_is_missing_and_who_failed() -> None:
    table, stamp = _table(), Stamp(1, 1, 1)
    assert table.missing(stamp, 3) == [0, 1, 2]
    table.place(stamp, 3, 1, "")
    assert table.missing(stamp, 3) == [0, 2]
    table.place(stamp, 3, 2, "NoSpace: full")
    with pytest.raises(CheckpointError, match="rank 2 has no replica: NoSpace: full"):
        table.missing(stamp, 3)


class _Lost(Exception):
    """The run dies here."""


class _Cluster:
    """Keepers, and runs that save and die at any point between two messages."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.nodes = self.random.randint(1, 6)
        self.per_node = self.random.randint(1, 2)
        self.world = self.nodes * self.per_node
        self.tables = [self._new_shelf() for _ in range(self.nodes)]
        self.acknowledged: Stamp | None = None
        self.marked: set[Stamp] = set()
        """Of which a mark was made: all their data had been in place."""
        self.epoch = 0
        self.lost: set[int] = set()
        """Nodes lost since the last acknowledged save."""

    def _new_shelf(self) -> ReplicaTable:
        # Own and buddy's data of two saves: the bound that the docs tell.
        return _table(limit=2 * 2 * self.per_node)

    def _maybe_die(self) -> None:
        if self.random.random() < 0.02:
            raise _Lost

    def run(self) -> None:
        """One attempt: agrees on what there is, then saves until it dies."""
        self.epoch += 1
        found = newest_complete([table.inventory() for table in self.tables])
        self.check(found)
        for table in self.random.sample(self.tables, self.nodes):
            self._maybe_die()
            table.raise_fence(self.epoch)
            table.settle(None if found is None else found.stamp, self.world)
        for number in itertools.count(1):
            self._save(Stamp(self.epoch, number, self.random.randint(1, 99)))

    def _save(self, stamp: Stamp) -> None:
        ways = buddies(self.nodes)
        puts = [
            (node, rank)
            for rank in range(self.world)
            for node in (rank // self.per_node, ways[rank // self.per_node])
            if node is not None
        ]
        self.random.shuffle(puts)
        fails = self.random.random() < 0.1
        for node, rank in puts[: len(puts) // 2 if fails else None]:
            self._maybe_die()
            _keep(self.tables[node], stamp, rank, size=1, world=self.world)
        if fails:
            for table in self.tables:
                self._maybe_die()
                if self.random.random() < 0.8:  # an abort may not arrive
                    table.abort(stamp)
            return
        for table in self.random.sample(self.tables, self.nodes):
            self._maybe_die()
            self.marked.add(stamp)
            table.commit(stamp, self.world)
        self.acknowledged = stamp
        self.lost.clear()

    def lose_nodes(self) -> int:
        """Loses some, but never one and its buddy before a further save is acknowledged."""
        ways, count = buddies(self.nodes), 0
        for node in self.random.sample(range(self.nodes), self.random.randint(0, self.nodes)):
            holders = {ways[node], *(other for other, way in enumerate(ways) if way == node)}
            if None not in holders and not holders & self.lost:
                self.lost.add(node)
                self.tables[node] = self._new_shelf()
                count += 1
        return count

    def check(self, found: Complete | None) -> None:
        if found is not None:
            assert found.stamp in self.marked, "a save without its mark was taken for complete"
            for rank, nodes in enumerate(found.holders):
                for node in nodes:
                    entries = self.tables[node].inventory().entries
                    assert any(e.stamp == found.stamp and rank in e.ranks for e in entries)
        if self.acknowledged is not None:
            assert found is not None, "an acknowledged save is gone"
            assert found.stamp >= self.acknowledged


@pytest.mark.parametrize("chunk", range(4))
def test_what_was_acknowledged_survives_the_loss_of_nodes_but_not_of_buddies(chunk: int) -> None:
    deaths = losses = 0
    for seed in range(chunk * 150, (chunk + 1) * 150):
        cluster = _Cluster(seed)
        for _ in range(6):
            with pytest.raises(_Lost):
                cluster.run()
            deaths += 1
            losses += cluster.lose_nodes()
    assert deaths == 900
    assert losses > 200


def test_data_that_comes_after_its_save_was_given_up_is_refused() -> None:
    table = _table()
    table.reserve(Stamp(1, 1, 10), 0, 10)
    table.abort(Stamp(1, 1, 10))
    with pytest.raises(CheckpointError, match="gave up this save"):
        table.hold(Stamp(1, 1, 10), 2, 0)
    with pytest.raises(CheckpointError, match="gave up this save"):
        table.reserve(Stamp(1, 1, 10), 1, 10)
    assert (table.used_bytes, table.decided(Stamp(1, 1, 10))) == (0, False)
    _keep(table, Stamp(1, 2, 20), 0)
    assert table.decided(Stamp(1, 2, 20)) is None
