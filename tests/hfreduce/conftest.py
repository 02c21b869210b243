"""What the tests of this part share: group shapes, memory kinds, inputs, references, and gangs with a group.

A shape is a string with one letter a rank: ranks with the same letter share a (virtual) host.
"""

import os
import signal
import time
import warnings
import zlib
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fireflyer.hfreduce as hfreduce
import fireflyer.hfreduce.torch  # noqa: F401  # each rank would import it for its group
from fireflyer.hfreduce.rendezvous import establish

TIMEOUT_S = 60.0
SHAPES = ("A", "AA", "AB", "AAA", "ABC", "AAAA", "AABB", "ABAB", "AAABB", "ABBBB", "AABBC")
MEMORY = ("zero-copy", "staged", "mixed", "slice", "strided")
FLOATS = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
DTYPES = (*FLOATS, *INTEGERS, torch.bool)
BITWISE = ("BAND", "BOR", "BXOR")
ARITHMETIC = ("SUM", "MIN", "MAX", "PRODUCT")
EPSILON = {  # half a unit in the last place of 1
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
    torch.float8_e4m3fn: 2.0**-4,
    torch.float8_e5m2: 2.0**-3,
}
_POOL = 400_009


def operations(dtype: torch.dtype) -> tuple[str, ...]:
    """The reduce operations that have a meaning for `dtype`."""
    return (*ARITHMETIC, "AVG") if dtype in FLOATS else (*ARITHMETIC, *BITWISE)


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- memory ----------------------------------------------------------------------------------------


def place(source: torch.Tensor, memory: str, index: int = 0) -> torch.Tensor:
    """A copy of the 1-D `source` in the given kind of memory; `index` alternates in mixed memory."""
    if memory == "mixed":
        memory = ("staged", "zero-copy")[index % 2]
    if memory == "zero-copy":
        return hfreduce.empty_like(source).copy_(source)
    if memory == "slice":
        return hfreduce.empty(len(source) + 3, dtype=source.dtype)[3:].copy_(source)
    if memory == "strided":
        return torch.zeros(len(source), 2, dtype=source.dtype)[:, 1].copy_(source)
    return source.clone()


def raw(tensor: torch.Tensor) -> bytes:
    dense = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return dense.view(torch.uint8).numpy().tobytes()


# -- inputs and references -------------------------------------------------------------------------


@cache
def _pool(kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(kind.encode()))
    if kind == "integers":
        return torch.randint(-(2**63), 2**63 - 1, (_POOL,), generator=generator)
    if kind == "factors":
        table = torch.tensor([0.5, 0.75, 1.0, 1.25, 1.5, 2.0, -0.5, -1.0, -2.0]).double()
        return table[torch.randint(len(table), (_POOL,), generator=generator)]
    return torch.randn(_POOL, generator=generator, dtype=torch.float64).clamp(-4, 4)


def values(dtype: torch.dtype, count: int, seed: int, op: str = "SUM") -> torch.Tensor:
    """`count` elements that depend on the arguments alone; the whole range for integers."""
    kind = "integers" if dtype not in FLOATS else "factors" if op == "PRODUCT" else "normal"
    start = seed * 104_729 % (_POOL - count)
    chosen = _pool(kind)[start : start + count]
    return (chosen % 2 == 0) if dtype is torch.bool else chosen.to(dtype)


def _fold(inputs: list[torch.Tensor], function: Callable[..., torch.Tensor]) -> torch.Tensor:
    result = inputs[0]
    for other in inputs[1:]:
        result = function(result, other)
    return result


def _reduced_integers(inputs: list[torch.Tensor], op: str) -> torch.Tensor:
    dtype = inputs[0].dtype
    functions: dict[str, Callable[..., torch.Tensor]] = {
        "SUM": torch.add,
        "PRODUCT": torch.mul,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "BAND": torch.bitwise_and,
        "BOR": torch.bitwise_or,
        "BXOR": torch.bitwise_xor,
    }
    if dtype is torch.bool:
        logical = {"SUM": "BOR", "MAX": "BOR", "PRODUCT": "BAND", "MIN": "BAND"}
        return _fold(inputs, functions[logical.get(op, op)])
    return _fold([i.long() for i in inputs], functions[op]).to(dtype)  # wraps


def accumulated(inputs: list[torch.Tensor]) -> torch.Tensor:
    """The sum as one host forms it: in float32 (float64 for float64), in rank order, rounded once."""
    dtype = inputs[0].dtype
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    return _fold([i.to(wide) for i in inputs], torch.add).to(dtype)


def reference(
    inputs: list[torch.Tensor], op: str, hosts: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The reduction of the ranks' inputs, and the error allowed (None: exact).

    Inside a host the accumulation rounds n times in float32 and once to the dtype; between hosts every
    hop rounds once. Sums on one host have one right answer.
    """
    dtype, n = inputs[0].dtype, len(inputs)
    if dtype not in FLOATS:
        return _reduced_integers(inputs, op), None
    wide = [i.double() for i in inputs]
    if op in ("MIN", "MAX"):
        return _fold(wide, torch.minimum if op == "MIN" else torch.maximum), None
    if op == "SUM" and hosts == 1:
        return accumulated(inputs).double(), None
    exact = _fold(wide, torch.mul if op == "PRODUCT" else torch.add)
    magnitude = exact.abs() if op == "PRODUCT" else _fold([w.abs() for w in wide], torch.add)
    accumulate = EPSILON[torch.float64 if dtype is torch.float64 else torch.float32]
    limit = 2 * magnitude * (n * accumulate + (hosts + 1) * EPSILON[dtype])
    if op == "AVG":
        exact, limit = exact / n, limit / n
    smallest = torch.finfo(dtype).smallest_normal * EPSILON[dtype]  # half a subnormal step
    return exact, limit + 2 * (hosts + 1) * smallest


def difference(
    got: torch.Tensor, wanted: torch.Tensor, limit: torch.Tensor | None = None
) -> str | None:
    """What is wrong with `got`, or None."""
    if got.shape != wanted.shape:
        return f"shape {tuple(got.shape)} instead of {tuple(wanted.shape)}"
    if got.is_floating_point():
        got, wanted = got.double(), wanted.double()
    wrong = (got != wanted) if limit is None else ~((got - wanted).abs() <= limit)
    if not bool(wrong.any()):
        return None
    first = int(wrong.flatten().nonzero()[0])
    allowed = "" if limit is None else f" +- {float(limit.flatten()[first]):.3g}"
    return (
        f"{int(wrong.sum())} of {wrong.numel()} wrong, first [{first}]: {got.flatten()[first].item()!r}"
        f" instead of {wanted.flatten()[first].item()!r}{allowed}"
    )


# -- ranks -----------------------------------------------------------------------------------------


def init(path: str, rank: int, world: int, timeout_s: float = 60.0) -> Any:
    """The default group of torch, over hfreduce; `path` is of a FileStore for it alone."""
    dist.init_process_group(
        "hfreduce",
        store=dist.FileStore(path, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
    )
    return dist.group.WORLD


def connect(path: str, rank: int, world: int, timeout_s: float = 60.0) -> establish.Connection:
    """The same below torch."""
    return establish.connect(dist.FileStore(path, world), rank, world, timeout_s)


def meet(path: str, rank: int, world: int) -> None:
    """Waits until all ranks have come here, beside their group; once a path.

    Whoever is to die or freeze comes here first: a call that has ended on one rank may be under way on the
    others, and a connecting rank goes down with the one it connects to.
    """
    store = dist.FileStore(path + "-met", world)
    store.set(str(rank), "here")
    for other in range(world):
        store.get(str(other))


def comes_true(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Waits until it is so; False where it is not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        os.sched_yield()
    return True


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# -- gangs -----------------------------------------------------------------------------------------

Play = Callable[..., list[Any]]


@pytest.fixture
def play(start_gang: Callable[..., Any], tmp_path: Path) -> Play:
    """play(body, shape, backend="hfreduce", leave=True): what `body(rank, world)` returns on every rank.

    The ranks share hosts as the shape says and have a default group; with `leave` they meet and
    destroy it at the end.
    """
    runs = 0

    def play(
        body: Callable[[int, int], Any], shape: str, backend: str = "hfreduce", leave: bool = True
    ) -> list[Any]:
        nonlocal runs
        runs += 1
        path = str(tmp_path / f"store-{runs}")

        def rank_body(rank: int, world: int) -> Any:
            os.environ["FIREFLYER_NODE"] = shape[rank]
            warnings.simplefilter("ignore", FutureWarning)  # torch's for names that its users call
            store = dist.FileStore(path, world)
            store.set_timeout(timedelta(seconds=TIMEOUT_S))
            dist.init_process_group(
                backend,
                store=store,
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=TIMEOUT_S),
            )
            result = body(rank, world)
            if leave:
                dist.barrier()
                dist.destroy_process_group()
            return result

        gang = start_gang(rank_body, len(shape))
        results: list[Any] = gang.results()
        return results

    return play
