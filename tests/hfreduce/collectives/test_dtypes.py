"""Every operation works with every element type it has a meaning for, rounds once, and refuses the rest."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.hfreduce.collectives.cases import MOVING, REDUCING, Case, check_cases
from tests.hfreduce.conftest import (
    BITWISE,
    DTYPES,
    FLOATS,
    INTEGERS,
    MEMORY,
    Play,
    accumulated,
    difference,
    name,
    operations,
    place,
)
from torch.distributed import ReduceOp

BYTE_FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2)
by_name = pytest.mark.parametrize("dtype", DTYPES, ids=name)
floats_by_name = pytest.mark.parametrize("dtype", FLOATS, ids=name)


@pytest.mark.sample(2, 10)
@pytest.mark.parametrize("shape", ["AAA", "AABBC"])
@by_name
def test_every_operation(play: Play, shape: str, dtype: torch.dtype) -> None:
    counts = (1001, 20_000)
    check_cases(
        play,
        shape,
        [
            Case(c, dtype, op, counts[(i + j) // 2 % 2], MEMORY[(i + j) % 5], i % 2 == 0, j % 3, j)
            for i, c in enumerate(sorted(REDUCING))
            for j, op in enumerate(operations(dtype))
        ],
    )


@pytest.mark.sample(3, 10)
@pytest.mark.parametrize("shape", ["AAA", "AABBC"])
@by_name
def test_every_move(play: Play, shape: str, dtype: torch.dtype) -> None:
    check_cases(
        play,
        shape,
        [
            Case(c, dtype, "SUM", 1001, memory, i % 2 == 0, i % len(shape), i)
            for i, c in enumerate(sorted(MOVING))
            for memory in ("zero-copy", "staged")
        ],
    )


# -- rounding --------------------------------------------------------------------------------------


def all_patterns(dtype: torch.dtype) -> torch.Tensor:
    """Every value that a one- or two-byte float can have, NaN and infinities too."""
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.uint8).view(dtype)
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


def pairs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Every value beside many others: all pairs of one-byte floats, 4 partners of each two-byte float."""
    values = all_patterns(dtype)
    if dtype.itemsize == 1:
        bits = values.view(torch.uint8)
        return bits.repeat(256).view(dtype), bits.repeat_interleave(256).view(dtype)
    partners = [values.roll(shift) for shift in (1, 37, 129, 16_401)]
    return values.repeat(4), torch.cat(partners)


def same_numbers(got: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    got, wanted = got.double(), wanted.double()
    return (got == wanted) | (got.isnan() & wanted.isnan())


@pytest.mark.parametrize("memory", ["zero-copy", "staged"])
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=name
)
def test_every_value_is_added_as_torch_converts(
    play: Play, dtype: torch.dtype, memory: str
) -> None:
    """Ties to even, subnormals, NaN, infinity; only overflow of one-byte floats is left open."""
    left, right = pairs(dtype)
    wanted = accumulated([left, right])
    sure = torch.ones(len(left), dtype=torch.bool)
    if dtype in BYTE_FLOATS:
        largest = torch.finfo(dtype).max
        sure = ~((left.float() + right.float()).abs() > largest)

    def body(rank: int, world: int) -> list[str]:
        problems = []
        for count in (64, len(left)):  # a direct call and one in chunks
            for start in range(0, len(left), count)[:200]:
                part = slice(start, start + count)
                tensor = place((left, right)[rank][part], memory)
                dist.all_reduce(tensor)
                good = same_numbers(tensor, wanted[part]) | ~sure[part]
                if not bool(good.all()):
                    i = int((~good).nonzero()[0])
                    terms = (left[part][i].item(), right[part][i].item())
                    problems.append(f"{terms}: {tensor[i].item()}, not {wanted[part][i].item()}")
        return problems[:5]

    assert play(body, "AA") == [[], []]


@pytest.mark.parametrize(
    ("dtype", "first", "wanted"),
    [
        (torch.float16, 2048.0, 2052.0),
        (torch.bfloat16, 256.0, 260.0),
        (torch.float8_e4m3fn, 16.0, 20.0),
        (torch.float8_e5m2, 8.0, 12.0),
    ],
    ids=("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
)
def test_one_rounding_inside_a_host(
    play: Play, dtype: torch.dtype, first: float, wanted: float
) -> None:
    """first + 1 + 1 + 1, which is first where every addition rounds."""

    def body(rank: int, world: int) -> None:
        given = torch.full((40_000,), first if rank == 0 else 1.0).to(dtype)
        for kind in ("zero-copy", "staged"):
            tensor = place(given, kind)
            dist.all_reduce(tensor)
            assert bool((tensor.double() == wanted).all())
            tensor = place(given, kind)
            dist.reduce(tensor, 1)
            assert rank != 1 or bool((tensor.double() == wanted).all())
            part = place(given[:10_000], kind)
            dist.reduce_scatter_tensor(part, place(given, kind))
            assert bool((part.double() == wanted).all())

    play(body, "AAAA")


@floats_by_name
def test_tiny_numbers_are_not_flushed_to_zero(play: Play, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    step = info.smallest_normal * info.eps  # the smallest number above zero

    def body(rank: int, world: int) -> None:
        for shift in (1, 2):  # three ranks: 3 and 6 steps, which every type has
            for count in (33, 9000):
                tiny = torch.full((count,), shift * step, dtype=torch.float64).to(dtype)
                assert bool((tiny.double() == shift * step).all())
                for op, factor in ((ReduceOp.SUM, world), (ReduceOp.MAX, 1), (ReduceOp.MIN, 1)):
                    tensor = place(tiny, ("zero-copy", "staged")[shift % 2])
                    dist.all_reduce(tensor, op=op)
                    assert bool((tensor.double() == factor * shift * step).all()), (op, tensor[0])

    play(body, "AAB")


@pytest.mark.sample(8, 12)
@floats_by_name
@pytest.mark.parametrize("shape", ["AA", "AB"])
def test_not_a_number_is_not_lost(play: Play, dtype: torch.dtype, shape: str) -> None:
    """Training notices a bad gradient by it."""

    def body(rank: int, world: int) -> None:
        for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT):
            for memory in ("zero-copy", "staged"):
                for count in (50, 20_000):
                    given = torch.ones(count)
                    given[rank::10] = torch.nan
                    tensor = place(given.to(dtype), memory)
                    dist.all_reduce(tensor, op=op)
                    wanted = torch.zeros(count, dtype=torch.bool)
                    wanted[0::10] = wanted[1::10] = True
                    assert torch.equal(tensor.double().isnan(), wanted)

    play(body, shape)


@pytest.mark.parametrize("dtype", [d for d in FLOATS if d is not torch.float8_e4m3fn], ids=name)
def test_infinity_adds_up_as_it_should(play: Play, dtype: torch.dtype) -> None:
    def body(rank: int, world: int) -> None:
        given = torch.tensor([torch.inf, -torch.inf, torch.inf if rank else -torch.inf, 1.0])
        for memory in ("zero-copy", "staged"):
            tensor = place(given.to(dtype), memory)
            dist.all_reduce(tensor)
            assert tensor.float()[:2].tolist() == [torch.inf, -torch.inf]
            assert tensor.float()[2].isnan()
            assert tensor.float()[3].item() == world

    play(body, "AAB")


@pytest.mark.parametrize("dtype", INTEGERS, ids=name)
def test_integers_wrap_around(play: Play, dtype: torch.dtype) -> None:
    def body(rank: int, world: int) -> None:
        largest = torch.iinfo(dtype).max
        tensor = torch.full((9000,), largest if rank == 0 else 1, dtype=dtype)
        dist.all_reduce(tensor)
        wanted = torch.tensor([largest], dtype=dtype) + torch.tensor([world - 1], dtype=dtype)
        assert difference(tensor, wanted.expand(9000)) is None

    play(body, "AAB")


# -- refusals --------------------------------------------------------------------------------------


def forms(dtype: torch.dtype, world: int, rank: int) -> dict[str, Callable[..., Any]]:
    def tensor(count: int = 6) -> torch.Tensor:
        return torch.ones(count).to(dtype)

    return {
        "all_reduce": lambda **o: dist.all_reduce(tensor(), **o),
        "all_reduce_coalesced": lambda **o: dist.all_reduce_coalesced([tensor(), tensor()], **o),
        "reduce": lambda **o: dist.reduce(tensor(), 0, **o),
        "reduce_scatter": lambda **o: dist.reduce_scatter(tensor(), [tensor()] * world, **o),
        "reduce_scatter_tensor": lambda **o: dist.reduce_scatter_tensor(
            tensor(), tensor(6 * world), **o
        ),
    }


def refusal(call: Callable[[], Any]) -> str:
    """What the error of a wrong call says; at the call, or when an asynchronous one is waited for."""
    try:
        work = call()
        if work is not None:
            work.wait()
    except (ValueError, TypeError) as error:
        return str(error)
    return ""


def still_works(world: int) -> bool:
    tensor = torch.ones(9000)
    dist.all_reduce(tensor)
    return bool((tensor == world).all())


@pytest.mark.parametrize("shape", ["A", "AAB"])
def test_operations_without_meaning_are_refused_by_every_rank(play: Play, shape: str) -> None:
    """AVG of flags and bit operations on floats: an error that names both, and the group lives on."""

    def body(rank: int, world: int) -> None:
        refused = [(torch.bool, "AVG")]
        refused += [(dtype, op) for dtype in FLOATS for op in BITWISE]
        for dtype, op in refused:
            for form, call in forms(dtype, world, rank).items():
                for asynchronous in (False, True):
                    options = {"op": getattr(ReduceOp, op), "async_op": asynchronous}
                    said = refusal(partial(call, **options))
                    assert name(dtype) in said, (form, op, said)
                    assert op.lower() in said.lower(), (form, dtype, said)
            assert still_works(world)

    play(body, shape)


def test_tensors_that_do_not_fit_are_refused_by_every_rank(play: Play) -> None:
    def ones(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.ones(count, dtype=dtype)

    def body(rank: int, world: int) -> None:
        bad: dict[str, Callable[[], Any]] = {
            "gathered into too little": lambda: dist.all_gather_into_tensor(ones(5), ones(2)),
            "scattered from too little": lambda: dist.reduce_scatter_tensor(ones(2), ones(5)),
            "a part too few": lambda: dist.reduce_scatter(ones(2), [ones(2)] * (world - 1)),
            "an output too few": lambda: dist.all_gather([ones(2)] * (world - 1), ones(2)),
            "splits that do not add up": lambda: dist.all_to_all_single(
                ones(6), ones(6), [1, 2, 2], [1, 2, 2]
            ),
            "not divisible": lambda: dist.all_to_all_single(ones(7), ones(7)),
            "two types": lambda: dist.all_gather_into_tensor(ones(6, torch.float64), ones(2)),
        }
        for what, call in bad.items():
            assert refusal(call), what
            assert still_works(world)

    play(body, "AAB")
