"""Groups of any ranks, many, overlapping, short-lived, beside other backends: all serve everything."""

import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.hfreduce.collectives.cases import Case, collectives, run_case
from tests.hfreduce.conftest import Play, difference, place, values

from fireflyer.errors import ConfigError

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)


def nothing_wrong(results: list[list[str]]) -> bool:
    problems = [problem for found in results for problem in found]
    return not problems or pytest.fail("\n".join(problems[:12]))


def problems_in(group: Any, shape: str, count: int) -> list[str]:
    """Runs every collective once in the group and says what went wrong on this rank."""
    world = dist.get_world_size(group)
    cases = [
        Case(c, DTYPES[i % 4], "MAX", count, ("mixed", "staged")[i % 2], i % 3 == 0, i % world)
        for i, c in enumerate(collectives(world))
    ]
    return [f"{case}: {p}" for case in cases for p in run_case(case, shape, group).problems]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("shape", "members"),
    [
        ("AAAA", ([0, 1], [2, 3])),
        ("AABB", ([0, 2], [1, 3])),
        ("AAABB", ([0, 1, 3], [2, 4])),
        ("ABCA", ([0, 3], [1, 2])),
        ("AABB", ([3, 0], [2, 1])),
    ],
)
def test_every_collective_in_disjoint_groups(
    play: Play, shape: str, members: tuple[list[int], ...]
) -> None:
    def body(rank: int, world: int) -> list[str]:
        groups = [dist.new_group(ranks, backend="hfreduce") for ranks in members]
        mine = next(i for i, ranks in enumerate(members) if rank in ranks)
        return problems_in(groups[mine], shape, 3000)

    assert nothing_wrong(play(body, shape))


def test_every_collective_in_overlapping_groups(play: Play) -> None:
    members = ([0, 1, 2], [1, 2, 3], [0, 3], [0, 1, 2, 3])

    def body(rank: int, world: int) -> list[str]:
        groups = [dist.new_group(ranks) for ranks in members]
        found = []
        for ranks, group in zip(members, groups, strict=True):
            if rank in ranks:
                found += problems_in(group, "AABB", 2000)
        return found

    assert nothing_wrong(play(body, "AABB"))


@pytest.mark.parametrize("shape", ["AAA", "AAB", "ABC"])
def test_overlapping_groups_at_the_same_time(play: Play, shape: str) -> None:
    """A triangle of pairs and the whole, all with operations in flight, waited for backwards."""

    def body(rank: int, world: int) -> None:
        pairs = [[0, 1], [1, 2], [0, 2]]
        groups = [(pair, dist.new_group(pair)) for pair in pairs] + [([0, 1, 2], dist.group.WORLD)]
        started = []
        for round_ in range(10):
            for ranks, group in groups:
                if rank not in ranks:
                    continue
                memory = ("zero-copy", "staged")[round_ % 2]
                tensor = place(torch.full((200 * 11 ** (round_ % 3),), 1.0 + rank), memory)
                work = dist.all_reduce(tensor, group=group, async_op=True)
                started.append((work, tensor, sum(1.0 + r for r in ranks)))
                outputs = [torch.zeros(3000) for _ in ranks]
                work = dist.all_gather(outputs, torch.ones(3000), group=group, async_op=True)
                started += [(work, output, 1.0) for output in outputs]
        for work, tensor, wanted in reversed(started):
            assert work is not None
            work.wait()
            assert bool((tensor == wanted).all())

    play(body, shape)


def test_groups_called_in_different_orders(play: Play) -> None:
    """Operations of two groups are independent: one waiting for its ranks does not hold up the other."""

    def body(rank: int, world: int) -> None:
        first, second = dist.new_group(), dist.new_group()
        for count in (100, 50_000):
            tensors = [torch.full((count,), 1.0), torch.full((count,), 2.0)]
            pairs = list(zip((first, second), tensors, strict=True))
            works = [
                dist.all_reduce(tensor, group=group, async_op=True)
                for group, tensor in (pairs if rank == 0 else reversed(pairs))
            ]
            for work in works:
                assert work is not None
                work.wait()
            assert [t[-1].item() for t in tensors] == [2.0, 4.0]

    for shape in ("AA", "AB"):
        play(body, shape)


def test_twenty_groups(play: Play) -> None:
    def body(rank: int, world: int) -> None:
        subsets = [[r for r in range(world) if mask >> r & 1] for mask in range(1, 16)] * 2
        groups = [(ranks, dist.new_group(ranks)) for ranks in subsets[:20]]
        works = []
        for ranks, group in groups:
            if rank in ranks:
                tensor = torch.full((20_000,), 2.0**rank)
                work = dist.all_reduce(tensor, group=group, async_op=True)
                works.append((work, tensor, sum(2.0**r for r in ranks)))
        for work, tensor, wanted in works:
            assert work is not None
            work.wait()
            assert bool((tensor == wanted).all())
        for ranks, group in reversed(groups):
            if rank in ranks:
                dist.barrier(group)
                dist.destroy_process_group(group)
        tensor = torch.ones(10)
        dist.all_reduce(tensor)
        assert tensor[0] == world

    play(body, "AABB")


def test_a_group_of_one_beside_others(play: Play) -> None:
    def body(rank: int, world: int) -> list[str]:
        groups = [dist.new_group([r]) for r in range(world)]
        return problems_in(groups[rank], "AAB", 3000)

    assert nothing_wrong(play(body, "AAB"))


def test_a_group_says_what_it_is(play: Play) -> None:
    def body(rank: int, world: int) -> None:
        whole: Any = dist.group.WORLD
        assert (dist.get_backend(), whole.name()) == ("hfreduce", "hfreduce")
        assert (whole.rank(), whole.size()) == (rank, world)
        assert whole.group_name == dist.distributed_c10d._get_process_group_name(whole)
        group: Any = dist.new_group([1, 3], backend="hfreduce", group_desc="odd")
        if rank not in (1, 3):
            assert group == dist.GroupMember.NON_GROUP_MEMBER
            assert dist.get_rank(group) == -1
            return
        assert (group.rank(), group.size()) == (rank // 2, 2)
        assert (dist.get_rank(group), dist.get_world_size(group)) == (rank // 2, 2)
        assert dist.get_backend(group) == "hfreduce"
        assert dist.get_process_group_ranks(group) == [1, 3]
        assert dist.get_global_rank(group, 1) == 3
        assert dist.get_group_rank(group, 3) == 1
        assert group.group_name != whole.group_name
        assert group.group_desc == "odd"
        assert whole._get_backend_name() == "hfreduce"

    play(body, "AABB")


def test_subgroups_by_helpers_of_torch(play: Play) -> None:
    def body(rank: int, world: int) -> None:
        mine, groups = dist.new_subgroups(2)
        assert len(groups) == 2
        tensor = torch.full((5000,), float(rank))
        dist.all_reduce(tensor, group=mine)
        assert tensor[0].item() == (1.0 if rank < 2 else 5.0)
        mine, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
        tensor = torch.full((5000,), float(rank))
        dist.all_reduce(tensor, group=mine)
        assert tensor[0].item() == 3.0

    play(body, "AABB")


def test_beside_a_gloo_default_group(play: Play) -> None:
    def body(rank: int, world: int) -> list[str]:
        groups = [dist.new_group(r, backend="hfreduce") for r in ([0, 1, 2], [3, 4])]
        assert dist.get_backend() == "gloo"
        mine = groups[rank // 3]
        assert dist.get_backend(mine) == "hfreduce"
        found = problems_in(mine, "AABBB", 3000)
        tensor = torch.ones(10)
        dist.all_reduce(tensor)
        assert tensor[0] == world
        return found

    assert nothing_wrong(play(body, "AABBB", backend="gloo"))


def test_a_gloo_group_beside_the_default_group(play: Play) -> None:
    def body(rank: int, world: int) -> None:
        other = dist.new_group(backend="gloo")
        assert dist.get_backend(other) == "gloo"
        tensors = [torch.full((9000,), 1.0 + rank) for _ in range(6)]
        works = [
            dist.all_reduce(t, group=(None, other)[i % 2], async_op=True)
            for i, t in enumerate(tensors)
        ]
        for work in works:
            assert work is not None
            work.wait()
        assert [t[-1].item() for t in tensors] == [3.0] * 6

    play(body, "AB")


def test_groups_come_and_go(play: Play, store_path: str) -> None:
    """The default group is left and made again, of other sizes too; no descriptor stays behind."""

    def body(rank: int, world: int) -> int:
        dist.barrier()
        dist.destroy_process_group()
        counts = []
        for i in range(6):
            size = world - i % 2  # the last rank stays out every other time
            if rank < size:
                store = dist.FileStore(f"{store_path}-again-{i}", size)
                dist.init_process_group("hfreduce", store=store, rank=rank, world_size=size)
                group = dist.new_group(list(range(1, size)))
                if rank > 0:
                    tensor = torch.ones(30_000)
                    dist.all_reduce(tensor, group=group)
                    assert tensor[0] == size - 1
                output = torch.zeros(size * 5000)
                dist.all_gather_into_tensor(output, torch.full((5000,), float(rank)))
                assert output[-1] == size - 1
                dist.barrier()
                dist.destroy_process_group()
            counts.append(len(os.listdir("/proc/self/fd")))
        return max(counts[4:]) - max(counts[:2])

    assert all(extra <= 0 for extra in play(body, "AABB", leave=False))


@pytest.mark.sample(1, 1)
@pytest.mark.parametrize("shape", ["AAA", "ABC"])
def test_whoever_is_done_may_leave(play: Play, shape: str) -> None:
    """A rank that has its result destroys the group and goes; the slower ones still get theirs."""

    def body(rank: int, world: int) -> bool:
        given = [values(torch.float32, 100_000, r) for r in range(world)]
        outputs = [torch.zeros(100_000) for _ in range(world)]
        dist.all_gather(outputs, given[rank])
        tensor = given[rank].clone()
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        dist.destroy_process_group()
        wanted = torch.stack(given).amax(0)
        gathered = [difference(o, g) for o, g in zip(outputs, given, strict=True)]
        return [*gathered, difference(tensor, wanted)] == [None] * (world + 1)

    for _ in range(5):
        assert play(body, shape, leave=False) == [True] * len(shape)


def test_a_tensor_may_go_through_several_groups(play: Play) -> None:
    """Zero-copy memory is mapped by the peers of every group that meets it."""

    def body(rank: int, world: int) -> None:
        tensor = place(torch.full((40_000,), 1.0), "zero-copy")
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        for _ in range(3):
            dist.all_reduce(tensor, group=pairs[rank // 2])
            dist.all_reduce(tensor, group=across[rank % 2])
            dist.all_reduce(tensor)
        assert bool((tensor == 16.0**3).all())

    play(body, "AABB")


@pytest.mark.parametrize(
    "orders",
    [
        {0: ([0, 1], [0, 2]), 1: ([0, 2], [0, 1]), 2: ([0, 1], [0, 2])},
        {0: ([0, 1], [1, 2]), 1: ([1, 2], [0, 1]), 2: ([0, 1], [1, 2])},
        {0: ([0, 1, 2], [2, 0, 1]), 1: ([2, 0, 1], [0, 1, 2]), 2: ([0, 1, 2], [2, 0, 1])},
    ],
    ids=["disjoint views", "overlapping", "permuted"],
)
def test_groups_created_in_another_order_are_an_error_everywhere(
    play: Play, orders: dict[int, tuple[list[int], list[int]]]
) -> None:
    """Rank 1 swaps two calls."""

    def body(rank: int, world: int) -> str:
        def create() -> None:
            for ranks in orders[rank]:
                dist.new_group(ranks, backend="hfreduce", sort_ranks=False)

        with pytest.raises(ConfigError) as caught:
            create()
        return str(caught.value)

    for said in play(body, "AAA"):
        assert "the ranks create groups in different orders: " in said
        assert re.search(
            r"of group \d+, .*rank 1 creates it of|is group \d+ on rank .*, but group", said
        )
        assert "rank 1" in said


def swapped_lines(rank: int) -> None:
    def one() -> None:
        dist.new_group(backend="hfreduce")

    def other() -> None:
        dist.new_group(backend="hfreduce")

    for create in (other, one) if rank == 1 else (one, other):
        create()


def swapped_names(rank: int) -> None:
    for name in ("b", "a") if rank == 1 else ("a", "b"):
        dist.new_group(backend="hfreduce", group_desc=name)


def one_left_out(rank: int) -> None:
    if rank != 1:
        dist.new_group(backend="hfreduce")
    dist.new_group(backend="hfreduce")
    dist.new_group(backend="hfreduce")


@pytest.mark.parametrize("create", [swapped_lines, swapped_names, one_left_out])
def test_groups_of_equal_ranks_created_in_another_order_are_an_error_everywhere(
    play: Play, create: Callable[[int], None]
) -> None:
    """Their members do not tell them apart: the lines that create them do, and their names."""

    def body(rank: int, world: int) -> str:
        with pytest.raises(ConfigError) as caught:
            create(rank)
        return str(caught.value)

    for said in play(body, "AAA"):
        assert "the ranks create groups in different orders: the group of ranks [0, 1, 2] " in said
        assert re.search(
            r"test_groups.py:\d+ creates is group \d on rank \d, but group \d on", said
        )
        assert "rank 1" in said


def test_ranks_may_create_groups_at_different_lines(play: Play) -> None:
    def body(rank: int, world: int) -> list[float]:
        groups = []
        if rank == 0:
            groups.append(dist.new_group(backend="hfreduce"))
        if rank == 1:
            groups.append(dist.new_group(backend="hfreduce"))
        groups += [dist.new_group(backend="hfreduce") for _ in range(2)]
        tensor = torch.ones(1)
        for group in groups:
            dist.all_reduce(tensor, group=group)
        return tensor.tolist()

    assert play(body, "AA") == [[8.0], [8.0]]


def test_a_store_that_outlives_its_groups(start_gang: Any, store_path: str) -> None:
    """As torchrun's, between `destroy_process_group` and `init_process_group`."""

    def body(rank: int, world: int) -> list[list[float]]:
        store = dist.FileStore(store_path, world)
        sums = []
        for life in range(3):
            dist.init_process_group("hfreduce", store=store, rank=rank, world_size=world)
            group = dist.new_group([life % 2, 2])
            told = torch.ones(1) * (1 + life)
            dist.all_reduce(told)
            if rank in (life % 2, 2):
                dist.all_reduce(told, group=group)
            sums.append(told.tolist())
            dist.destroy_process_group()
        return sums

    assert start_gang(body, 3).results() == [
        [[6.0], [6.0], [18.0]],
        [[3.0], [12.0], [9.0]],
        [[6.0], [12.0], [18.0]],
    ]
