"""Rules: which counts, the file they come from, and that all ranks follow those of rank 0."""

import datetime
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.hfreduce.conftest import die, init, meet

from fireflyer._native import hfreduce as native
from fireflyer._native.hfreduce import ANY_BYTES, Algorithm, Kind, Rule
from fireflyer.errors import CollectiveError, ConfigError
from fireflyer.hfreduce import ProcessGroupHFReduce, rules
from fireflyer.hfreduce.topology import RankInfo

COUNT = 100_003  # 400 KB of float32: a ring by the engine's own rules
HEAD = 'version = 1\nmachine = "m"\nhosts = 3\n'


def rule(kind: Kind, algorithm: Algorithm, hosts: int = 2, size: int = ANY_BYTES) -> Rule:
    return Rule(kind=kind, hosts=hosts, bytes=size, algorithm=algorithm, lanes=0)


def peers(group: ProcessGroupHFReduce, kind: Kind = Kind.ALLREDUCE) -> list[int]:
    """Whom this rank sends to in a call of COUNT elements."""
    root = -1 if kind == Kind.ALLREDUCE else 0
    float32 = native.DType.FLOAT32
    return sorted(group._engine.peers(kind=kind, count=COUNT, dtype=float32, root=root))


def check_results(rank: int, world: int) -> None:
    """Sums of whole numbers are exact by every algorithm."""
    total = world * (world - 1) / 2
    pattern = torch.arange(COUNT) % 97
    for root in range(world):
        tensor = pattern + float(rank)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, pattern * world + total)
        tensor = pattern + float(rank)
        dist.reduce(tensor, root)
        if rank == root:
            assert torch.equal(tensor, pattern * world + total)
        tensor = pattern + float(rank)
        dist.broadcast(tensor, root)
        assert torch.equal(tensor, pattern + float(root))


def reduce_for_ever() -> None:
    while True:
        dist.all_reduce(torch.ones(10))


def test_the_first_rule_that_applies_counts() -> None:
    tree = rule(Kind.ALLREDUCE, Algorithm.TREE, hosts=4, size=1000)
    direct = rule(Kind.ALLREDUCE, Algorithm.DIRECT, hosts=3)
    chosen = [tree, direct, rule(Kind.ALLREDUCE, Algorithm.TREE)]

    def choose(kind: Kind, hosts: int, size: int) -> Rule:
        return native.choose_rule(chosen, kind, hosts, size)

    assert choose(Kind.ALLREDUCE, 4, 1000) == tree
    assert choose(Kind.ALLREDUCE, 5, 0) == tree
    assert choose(Kind.ALLREDUCE, 4, 1001) == direct
    assert choose(Kind.ALLREDUCE, 3, 1000) == direct
    assert choose(Kind.ALLREDUCE, 2, 1000) == chosen[2]
    assert choose(Kind.ALLREDUCE, 2, 1000) != direct
    for kind in (Kind.BROADCAST, Kind.REDUCE):
        for hosts in (2, 16, 100):
            for size in (1, 1 << 20):
                assert choose(kind, hosts, size) == native.choose_rule([], kind, hosts, size)
                assert choose(kind, hosts, size) in native.default_rules()
    with pytest.raises(ValueError, match="has no rules"):
        choose(Kind.ALL_GATHER, 2, 1)
    with pytest.raises(ValueError, match="two hosts"):
        choose(Kind.REDUCE, 1, 1)


@st.composite
def tables(draw: st.DrawFn) -> rules.Table:
    listed = []
    for kind in draw(st.lists(st.sampled_from(sorted(rules.ALGORITHMS)), max_size=6)):
        algorithm = draw(st.sampled_from(rules.ALGORITHMS[kind]))
        listed.append(
            Rule(
                kind=Kind[kind.upper()],
                hosts=draw(st.integers(2, 1000)),
                bytes=draw(st.integers(1, 1 << 40) | st.just(ANY_BYTES)),
                algorithm=Algorithm[algorithm.upper()],
                lanes=draw(st.integers(0, 64)),
            )
        )
    machine = draw(st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20))
    return rules.Table(machine, draw(st.integers(2, 1000)), tuple(listed))


@given(tables())
def test_files_and_cards_keep_tables(table: rules.Table) -> None:
    text = rules.dump(table)
    assert rules.parse(text, "file") == table
    info = RankInfo("m", "h", "u", "a", 1, rules=tuple(map(rules._packed, table.rules)))
    assert rules.rules_of(info) == list(table.rules)


GOOD = '[[rules]]\nkind = "allreduce"\nhosts = 2\nalgorithm = "ring"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version = \n", "1: Invalid value"),
        (HEAD + GOOD + "bytes = [\n", "9: Invalid value"),
        ('machine = "m"\nhosts = 3\nrules = []\n', "1: no version, not 1"),
        ('machine = "m"\nversion = 2\nhosts = 3\nrules = []\n', "2: version 2, not 1"),
        (HEAD, "1: Object missing required field `rules`"),
        ('version = 1\nmachine = "m"\nhosts = "3"\nrules = []\n', "3: Expected `int`, got `str`"),
        (HEAD + "colour = 1\n" + GOOD, "4: Object contains unknown field `colour`"),
        (HEAD + GOOD + GOOD + 'bytes = "1K"\n', "12: Expected `int | null`, got `str`"),
        (HEAD + GOOD + GOOD + "lane = 1\n", "12: Object contains unknown field `lane`"),
        (HEAD + GOOD + '[[rules]]\nkind = "reduce"\n', "8: Object missing required field `hosts`"),
        (HEAD + GOOD.replace("2", "1"), "6: Expected `int` >= 2"),
        (HEAD + GOOD.replace("allreduce", "gather"), "5: Invalid enum value 'gather'"),
        (HEAD + GOOD.replace("ring", "star"), "7: allreduce by 'star': use ring, tree, direct"),
        (
            HEAD + GOOD + GOOD.replace("allreduce", "reduce"),
            "11: reduce by 'ring': use chain, tree",
        ),
    ],
)
def test_broken_tables_name_the_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        rules.parse(text, "/etc/table.toml")
    assert str(raised.value).startswith(f"/etc/table.toml:{message}")


def test_every_algorithm_gives_the_reference(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    def body(rank: int, world: int) -> None:
        group = init(store_path, rank, world)
        for kind, algorithms in rules.ALGORITHMS.items():
            for algorithm in algorithms:
                for lanes in (0, 1):
                    wanted = Rule(
                        kind=Kind[kind.upper()],
                        hosts=2,
                        bytes=ANY_BYTES,
                        algorithm=Algorithm[algorithm.upper()],
                        lanes=lanes,
                    )
                    group.set_rules([wanted])
                    check_results(rank, world)

    start_gang(body, 6, 3).results()


def test_all_ranks_follow_the_table_of_rank_0(
    start_gang: Callable[..., Any], store_path: str, tmp_path: Path
) -> None:
    everything = [rule(Kind[kind.upper()], Algorithm.TREE) for kind in rules.ALGORITHMS]
    good, other = tmp_path / "tree.toml", tmp_path / "other.toml"
    good.write_text(rules.dump(rules.Table("a test", 3, tuple(everything))))
    other.write_text("not read by anybody")

    def body(rank: int, world: int) -> tuple[list[int], list[int]]:
        os.environ[rules.VARIABLE] = str(good if rank == 0 else other)
        group = init(store_path, rank, world)
        check_results(rank, world)
        return peers(group, Kind.BROADCAST), peers(group, Kind.REDUCE)

    # Two trees, of which each other rank leads one. A chain would reach the next rank alone.
    down, up = zip(*start_gang(body, 3, 3).results(), strict=True)
    assert down == ([1, 2], [2], [1])
    assert up == ([], [0, 2], [0, 1])


@pytest.mark.parametrize("content", ["version = 1\nhosts = two\n", None])
def test_a_broken_table_is_an_error_on_every_rank(
    start_gang: Callable[..., Any], store_path: str, tmp_path: Path, content: str | None
) -> None:
    table = tmp_path / "table.toml"
    if content is not None:
        table.write_text(content)

    def body(rank: int, world: int) -> str:
        if rank == 0:
            os.environ[rules.VARIABLE] = str(table)
        with pytest.raises(ConfigError) as raised:
            init(store_path, rank, world)
        return str(raised.value)

    said = "cannot read this table: No such" if content is None else "Invalid value"
    first, second = start_gang(body, 2).results()
    assert first.startswith(f"{rules.VARIABLE}={table}:{'2:' if content else ''} {said}")
    assert second == f"rank 0 cannot take part: {first}"


def test_the_rules_outlive_rank_0(
    start_gang: Callable[..., Any], store_path: str, tmp_path: Path
) -> None:
    table = tmp_path / "table.toml"
    direct = rule(Kind.ALLREDUCE, Algorithm.DIRECT)
    table.write_text(rules.dump(rules.Table("a test", 4, (direct,))))

    def body(rank: int, world: int) -> list[int]:
        os.environ[rules.VARIABLE] = str(table)
        group = init(store_path, rank, world)
        meet(store_path, rank, world)
        if rank == 0:
            die()
        with pytest.raises(CollectiveError):
            reduce_for_ever()
        os.environ[rules.VARIABLE] = "/nobody/reads/this"
        group.reform(datetime.timedelta(seconds=30))
        tensor = torch.ones(COUNT)
        group.allreduce([tensor]).wait()
        assert tensor[-1] == 3
        return peers(group)

    assert start_gang(body, 4, 4).results() == [None, [1, 2], [0, 2], [0, 1]]
