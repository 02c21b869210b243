"""Every collective is timed, checked for its values, and counted as nccl-tests counts."""

import math
from collections.abc import Callable

import pytest
import torch

from fireflyer.bench.collectives import cases, one_host, overhead
from fireflyer.bench.harness import goals
from fireflyer.errors import ConfigError

K, M = 1 << 10, 1 << 20


def spec(collective: str, ranks: int, **changes: object) -> one_host.Spec:
    values: dict[str, object] = {
        "sizes": (12_000,),
        "dtypes": ("float32",),
        "op": "sum",
        "memory": ("zero-copy", "staged"),
        "against": ("gloo",),
        "rounds": 1,
    }
    return one_host.Spec(collective=collective, ranks=ranks, **{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("collective", "size", "count", "bus"),
    [
        ("allreduce", 12_000, 3000, 4 / 3),
        ("allgather", 12_000, 1000, 2 / 3),
        ("reduce_scatter", 12_000, 1000, 2 / 3),
        ("broadcast", 12_000, 3000, 1.0),
        ("reduce", 12_000, 3000, 1.0),
        ("alltoall", 12_000, 1000, 2 / 3),
        ("sendrecv", 12_000, 3000, 1.0),
        ("barrier", 0, 0, 0.0),
    ],
)
def test_every_collective(collective: str, size: int, count: int, bus: float) -> None:
    rows, nccl = one_host.run(spec(collective, 3))
    assert [row.who for row in nccl] == ["zero-copy", "staged", "gloo"]
    for row in nccl:
        assert (row.size, row.count, row.wrong) == (size, count, 0)
        assert row.algbw == pytest.approx(size / row.time_us / 1e3)
        assert row.busbw == pytest.approx(row.algbw * bus)
    peers = ["gloo", "gloo"] + (["add limit", "update limit", "copy limit"] if size else [])
    assert [row.peer for row in rows] == ["cores"] * bool(size) + peers * 2  # two kinds of memory


def test_a_refused_case_says_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="hfreduce: allreduce of float32, bxor: "):
        one_host.run(spec("allreduce", 2, op="bxor"))


def test_bfloat16_is_compared_with_our_float32() -> None:
    rows, nccl = one_host.run(
        spec("allreduce", 2, dtypes=("float32", "bfloat16"), memory=("zero-copy",), op="avg")
    )
    assert [row.count for row in nccl if row.type == "bfloat16"] == [6000, 6000]
    (compared,) = [row for row in rows if row.peer == "our float32"]
    assert compared.case.startswith("2 ranks, bfloat16")


def case_of(output: torch.Tensor, change: Callable[[torch.Tensor], object]) -> cases.Case:
    """A collective that copies its input, then changes something in the output."""
    source = torch.empty_like(output)
    values = [cases.ones_and_zeros(1)]

    def run() -> None:
        output.copy_(source)
        change(output)

    return cases.Case(run, source, values, output, values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.int64])
def test_wrong_elements_are_counted_one_by_one(dtype: torch.dtype) -> None:
    output = torch.empty(cases.BLOCK + 5000, dtype=dtype)
    assert case_of(output, lambda _: None).wrong() == 0
    places = torch.tensor([0, 4000, cases.BLOCK + 4999])

    def spoil(t: torch.Tensor) -> None:
        t[places] = (t[places].double() + 1).to(dtype)

    assert case_of(output, spoil).wrong() == 3


def test_nan_and_a_shifted_result_are_wrong() -> None:
    output = torch.empty(4096)

    def spoil(t: torch.Tensor) -> None:
        t[7] = math.nan

    assert case_of(output, spoil).wrong() == 1
    assert case_of(output, lambda t: t.copy_(t.roll(1024))).wrong() > 1000
    other_rank = cases.ones_and_zeros(2).repeat(5)[:4096]
    assert case_of(output, lambda t: t.copy_(other_rank)).wrong() > 1000


@pytest.mark.parametrize(
    ("collective", "memory", "formula", "moved"),
    [
        ("allreduce", "zero-copy", "2nS", 800),
        ("allreduce", "staged", "2nS", 800),
        ("allreduce", "shared", "(n+1)S", 500),
        ("reduce_scatter", "zero-copy", "(n+1)S", 500),
        ("reduce", "staged", "(n+1)S", 500),
        ("broadcast", "zero-copy", "2(n-1)S", 600),
        ("alltoall", "zero-copy", "2nS", 800),
    ],
)
def test_bytes_moved(collective: str, memory: str, formula: str, moved: int) -> None:
    assert cases.bytes_moved(collective, memory, ranks=4, size=100) == (formula, moved)


@pytest.mark.parametrize(
    ("ranks", "memory", "size", "gloo", "mpi"),
    [
        (2, "zero-copy", 64 * K, 40, 1 / 1.1),
        (4, "staged", 128 * M, 5.5, 5),
        (8, "zero-copy", M, 28, None),
        (8, "staged", 16 * M, 4.3, None),
        (3, "staged", 16 * M, None, None),
        (2, "zero-copy", 2 * M, None, None),
        (2, "shared", 16 * M, None, None),
    ],
)
def test_goals(ranks: int, memory: str, size: int, gloo: float | None, mpi: float | None) -> None:
    assert goals.against_gloo("allreduce", "float32", memory, ranks, size) == gloo
    assert goals.against_mpi("allreduce", "float32", memory, ranks, size) == mpi
    assert goals.against_gloo("allgather", "float32", memory, ranks, size) is None


def test_overhead_compares_with_gloo_and_the_time_allowed() -> None:
    rows = overhead.run(ranks=1, rounds=1)
    assert [row.peer for row in rows] == ["allowed", "gloo", "gloo"] * 2
    assert [row.peer_value for row in rows if row.peer == "allowed"] == [8.0, 20.0]
