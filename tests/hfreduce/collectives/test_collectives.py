"""Every collective gives every rank what it should, whatever the group, the memory, the size and the type.

Generated cases: one gang a shape runs a list of them; a failure shows the simplest case that fails alone.
"""

import random
import zlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from tests import draws
from tests.hfreduce.collectives.cases import (
    REDUCING,
    Case,
    check_cases,
    collectives,
    failures_of,
    run_case,
)
from tests.hfreduce.conftest import (
    DTYPES,
    MEMORY,
    SHAPES,
    Play,
    difference,
    operations,
    place,
    raw,
    values,
)

COUNTS = (0, 1, 7, 1000, 8191, 8192, 8193, 65_536)
LARGE = 300_001
EXAMPLES = draws.cases(100)


def case_of(number: int, world: int) -> Case:
    pick = random.Random(number)
    collective, dtype = pick.choice(collectives(world)), pick.choice(DTYPES)
    return Case(
        collective,
        dtype,
        pick.choice(operations(dtype)) if collective in REDUCING else "SUM",
        pick.choice((*COUNTS, pick.randrange(70_000))),
        pick.choice(MEMORY),
        pick.random() < 0.5,
        pick.randrange(world),
        pick.randrange(1000),
    )


def cases(world: int) -> st.SearchStrategy[Case]:
    """One number decides all of a case: drawn apart, the choices in mutated examples repeat each other."""
    return st.integers(0, 2**48).map(lambda number: case_of(number, world))


def generated(shape: str, examples: int) -> list[Case]:
    """The same cases in every process of a run."""
    found: list[Case] = []

    @seed(zlib.crc32(shape.encode()) ^ draws.seed())
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
    )
    @given(cases(len(shape)))
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    return found


@pytest.mark.sample(1, 4)
@pytest.mark.parametrize("shape", SHAPES)
def test_generated_cases(play: Play, shape: str) -> None:
    check_cases(play, shape, generated(shape, EXAMPLES))


@pytest.mark.sample(1, 1)
@pytest.mark.parametrize("shape", ["AAA", "AAABB"])
def test_every_collective_at_the_borders_of_chunks(play: Play, shape: str) -> None:
    """In float32 a direct call, a chunk and a staging ring end at or near these counts."""
    world = len(shape)
    check_cases(
        play,
        shape,
        [
            Case(
                c, torch.float32, "SUM", count, MEMORY[(i + j) % len(MEMORY)], j % 2 == 1, i % world
            )
            for i, c in enumerate(collectives(world))
            for j, count in enumerate((0, 1, 7, 8191, 8192, 8193, 65_535, 65_536, 65_537))
        ],
    )


@pytest.mark.sample(1, 1)
@pytest.mark.parametrize("shape", ["AA", "ABB"])
def test_every_collective_with_large_tensors(play: Play, shape: str) -> None:
    world = len(shape)
    check_cases(
        play,
        shape,
        [
            Case(c, dtype, "SUM", LARGE, memory, True, (i + 1) % world)
            for i, c in enumerate(collectives(world))
            for dtype, memory in ((torch.float32, "mixed"), (torch.bfloat16, "strided"))
        ],
    )


@pytest.mark.sample(1, 1)
@pytest.mark.parametrize("shape", ["AAAA", "AAABB"])
def test_every_collective_with_every_kind_of_memory(play: Play, shape: str) -> None:
    world = len(shape)
    check_cases(
        play,
        shape,
        [
            Case(c, torch.float32, "MAX", 10_007, memory, asynchronous, i % world)
            for i, c in enumerate(collectives(world))
            for memory in MEMORY
            for asynchronous in (False, True)
        ],
    )


@pytest.mark.sample(1, 1)
@pytest.mark.parametrize("shape", ["AAAA", "AAABB", "ABAB"])
def test_bits_are_the_same_in_another_run(play: Play, shape: str) -> None:
    """Two gangs, each with its own timing."""
    chosen = [
        Case(c, dtype, op, count, "mixed", count % 2 == 0)
        for c in ("all_reduce", "reduce_scatter_tensor", "reduce")
        for dtype in (torch.float32, torch.bfloat16)
        for op in ("SUM", "AVG", "PRODUCT")
        for count in (1001, 40_000)
    ]

    def body(rank: int, world: int) -> list[bytes]:
        return [run(case, rank, world) for case in chosen]

    def run(case: Case, rank: int, world: int) -> bytes:
        op = getattr(dist.ReduceOp, case.op)
        parts = world if case.collective == "reduce_scatter_tensor" else 1
        given = values(case.dtype, parts * case.count, rank, case.op)
        tensor = place(given, case.memory, rank)
        if case.collective == "reduce_scatter_tensor":
            output = torch.empty(case.count, dtype=case.dtype)
            dist.reduce_scatter_tensor(output, tensor, op=op)
            return raw(output)
        if case.collective == "reduce":
            dist.reduce(tensor, 0, op=op)
            return raw(tensor) if rank == 0 else b""
        dist.all_reduce(tensor, op=op)
        return raw(tensor)

    assert play(body, shape) == play(body, shape)


def test_matrices_keep_their_layout(play: Play) -> None:
    """Inputs and outputs of more dimensions, in another order of strides than usual."""

    def body(rank: int, world: int) -> None:
        def matrix(fill: float) -> torch.Tensor:
            return (torch.arange(600.0).view(20, 30) + 1000 * fill).t()

        mine = matrix(rank)
        dist.all_reduce(mine)
        assert mine.stride() == (1, 30)
        assert difference(mine, sum((matrix(r) for r in range(world)), torch.zeros(30, 20))) is None
        outputs = [torch.zeros(20, 30).t() for _ in range(world)]
        dist.all_gather(outputs, matrix(rank))
        assert [difference(o, matrix(r)) for r, o in enumerate(outputs)] == [None] * world
        whole = torch.zeros(world, 30, 20)
        dist.all_gather_into_tensor(whole, matrix(rank))
        assert [difference(o, matrix(r)) for r, o in enumerate(whole)] == [None] * world
        part = torch.zeros(20, 30).t()
        dist.reduce_scatter_tensor(part, whole)
        assert difference(part, world * matrix(rank)) is None
        dist.reduce_scatter(part, outputs, op=dist.ReduceOp.MAX)
        assert difference(part, matrix(rank)) is None
        received = torch.zeros(20, 30).t()
        dist.broadcast(received if rank else outputs[1], 0)
        assert rank == 0 or difference(received, matrix(1)) is None
        dist.scatter(received, outputs if rank == 1 else None, src=1)
        assert difference(received, matrix(rank)) is None
        exchanged = torch.zeros(world, 30, 20)
        dist.all_to_all_single(exchanged, torch.stack([matrix(rank)] * world))
        assert [difference(o, matrix(r)) for r, o in enumerate(exchanged)] == [None] * world

    play(body, "AAB")


def test_scalars_and_tensors_without_elements(play: Play) -> None:
    def body(rank: int, world: int) -> None:
        scalar = torch.tensor(float(rank))
        dist.all_reduce(scalar)
        assert scalar.shape == ()
        assert scalar.item() == 3.0
        outputs = [torch.zeros(()) for _ in range(world)]
        dist.all_gather(outputs, torch.tensor(rank + 0.5))
        assert [o.item() for o in outputs] == [0.5, 1.5, 2.5]
        hollow = torch.empty(4, 0, 3)
        dist.all_reduce(hollow)
        dist.broadcast(hollow, 1)
        dist.all_gather([torch.empty(4, 0, 3) for _ in range(world)], hollow)
        assert hollow.shape == (4, 0, 3)

    play(body, "AAB")


def test_complex_tensors(play: Play) -> None:
    def body(rank: int, world: int) -> None:
        tensor = torch.full((1000,), complex(rank, 1.0))
        dist.all_reduce(tensor)
        assert bool((tensor == complex(3, 3)).all())
        outputs = [torch.zeros(10, dtype=torch.complex64) for _ in range(world)]
        dist.all_gather(outputs, torch.full((10,), complex(1.0, rank)))
        assert [o[9].item() for o in outputs] == [1, 1 + 1j, 1 + 2j]
        received = torch.full((5,), complex(7.0, rank))
        dist.broadcast(received, 2)
        assert received[0].item() == 7 + 2j

    play(body, "AAB")


@pytest.mark.parametrize("shape", ["AAA", "ABB"])
def test_all_gather_of_different_sizes(play: Play, shape: str) -> None:
    """Rank r's tensor has a size of its own; every rank's list says so."""

    def body(rank: int, world: int) -> None:
        for scale in (1, 5000, 100_000):
            sizes = [scale * ((r + 2) % world) for r in range(world)]
            outputs = [torch.zeros(n) for n in sizes]
            dist.all_gather(outputs, values(torch.float32, sizes[rank], rank))
            for r, output in enumerate(outputs):
                assert difference(output, values(torch.float32, sizes[r], r)) is None

    play(body, shape)


def test_roots_are_named_by_global_and_by_group_rank(play: Play) -> None:
    def body(rank: int, world: int) -> None:
        group = dist.new_group([3, 1, 2])  # in the group: ranks 0, 1, 2 are 1, 2, 3
        if rank == 0:
            return
        tensor = torch.tensor([rank])
        dist.broadcast(tensor, src=3, group=group)
        assert tensor.item() == 3
        tensor = torch.tensor([rank])
        dist.broadcast(tensor, group_src=0, group=group)
        assert tensor.item() == 1
        tensor = torch.tensor([rank])
        dist.reduce(tensor, dst=2, group=group)
        assert rank != 2 or tensor.item() == 6
        outputs = [torch.zeros(1, dtype=torch.int64) for _ in range(3)] if rank == 1 else None
        dist.gather(torch.tensor([rank]), outputs, dst=1, group=group)
        assert [int(o) for o in outputs or ()] == ([1, 2, 3] if rank == 1 else [])

    play(body, "AABB")


def test_one_tensor_may_be_input_and_output(play: Play) -> None:
    """all_gather_into_tensor and reduce_scatter_tensor in place, as FSDP calls them."""

    def body(rank: int, world: int) -> None:
        for count in (5, 50_000):
            for kind in ("zero-copy", "staged"):
                whole = place(torch.zeros(world * count), kind)
                part = whole[rank * count : (rank + 1) * count]
                part.copy_(values(torch.float32, count, rank))
                dist.all_gather_into_tensor(whole, part)
                wanted = torch.cat([values(torch.float32, count, r) for r in range(world)])
                assert difference(whole, wanted) is None
                dist.reduce_scatter_tensor(part, whole)
                assert difference(part, 3 * values(torch.float32, count, rank)) is None

    play(body, "AAB")


def test_a_barrier_holds_everybody_until_the_last_arrives(play: Play) -> None:
    """Who is past barrier k has seen everybody's arrival at barrier k."""

    def body(rank: int, world: int) -> None:
        store = dist.distributed_c10d._get_default_store()
        for k in range(20):
            store.set(f"arrived-{k}-{rank}", "")
            if k % 2:
                dist.barrier()
            else:
                work = dist.barrier(async_op=True)
                assert work is not None
                work.wait()
            assert store.check([f"arrived-{k}-{r}" for r in range(world)])

    play(body, "AAABB")


def test_a_wrong_result_is_found(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checker itself: one wrong element on one rank, an input that is written to, ranks that differ."""

    def lying(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        right(tensor, *args, **kwargs)
        if dist.get_rank() == 1 and len(tensor) > 5:
            tensor[5] += 1

    right = dist.broadcast
    monkeypatch.setattr(dist, "broadcast", lying)
    good, bad = Case("broadcast", count=5), Case("broadcast", count=6)
    (failure,) = failures_of(play, "AA", [good, bad, good])
    assert failure.case == bad
    assert failure.problems[0].startswith("rank 1: 1 of 6 wrong, first [5]: ")
    (failure,) = failures_of(play, "AA", [Case("broadcast", count=6, root=1)])
    assert failure.problems[1] == "rank 1: an input was modified"
    with pytest.raises(pytest.fail.Exception, match=r"fails alone: Case.*count=6,"):
        check_cases(play, "AA", [Case("broadcast", count=60), bad])


def test_cases_do_not_depend_on_the_run() -> None:
    assert generated("AAB", 30) == generated("AAB", 30)
    assert generated("AAB", 30) != generated("ABB", 30)


def test_a_group_of_one_serves_every_collective(play: Play) -> None:
    def body(rank: int, world: int) -> list[list[str]]:
        return [
            run_case(Case(c, dtype, op, 1000, memory), "A").problems
            for c in collectives(1)
            for dtype, op in ((torch.float32, "AVG"), (torch.int64, "BXOR"), (torch.bool, "SUM"))
            for memory in MEMORY
        ]

    (problems,) = play(body, "A")
    assert [p for found in problems for p in found] == []
