"""Collectives for benchmarks: buffers, one call, the expected values and the accounting.

Sizes follow nccl-tests. For allreduce, broadcast, reduce and sendrecv, the size is that of the
tensor; for allgather, reduce_scatter and alltoall, that of all ranks' parts together. Timed calls
work on zeros, so that sums neither overflow nor slow down.

A check fills the inputs with zeros and ones from a table of PERIOD entries, shifted by rank. The
period is prime, so a swapped slice, chunk or rank is always detected. All sums of up to 8 ranks are
exact in every dtype.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fireflyer import hfreduce

PERIOD = 1009
SHIFT = 131
BLOCK = PERIOD << 10  # number of elements compared at a time


@dataclass(frozen=True)
class Account:
    """Accounting rules of a collective.

    Attributes:
        reduces: True if the collective has a reduction.
        split: True if the size is that of all ranks' parts together.
        bus: ratio of bus bandwidth to algorithm bandwidth for n ranks, as in nccl-tests.
        formula: text of `moved`, with n ranks and the size S.
        moved: minimum number of bytes read and written on one host, for (ranks, size).
    """

    reduces: bool
    split: bool
    bus: Callable[[int], float]
    formula: str
    moved: Callable[[int, int], int]


ACCOUNTS = {
    "allreduce": Account(True, False, lambda n: 2 * (n - 1) / n, "2nS", lambda n, s: 2 * n * s),
    "allgather": Account(False, True, lambda n: (n - 1) / n, "2nS", lambda n, s: 2 * n * s),
    "reduce_scatter": Account(
        True, True, lambda n: (n - 1) / n, "(n+1)S", lambda n, s: (n + 1) * s
    ),
    "broadcast": Account(False, False, lambda _: 1.0, "2(n-1)S", lambda n, s: 2 * (n - 1) * s),
    "reduce": Account(True, False, lambda _: 1.0, "(n+1)S", lambda n, s: (n + 1) * s),
    "alltoall": Account(False, True, lambda n: (n - 1) / n, "2nS", lambda n, s: 2 * n * s),
    "sendrecv": Account(False, False, lambda _: 1.0, "2nS", lambda n, s: 2 * n * s),
    "barrier": Account(False, False, lambda _: 0.0, "0", lambda _n, _s: 0),
}


def bytes_moved(collective: str, memory: str, ranks: int, size: int) -> tuple[str, int]:
    """Returns the minimum bytes that a call reads and writes in memory, as a formula and a number.

    A staged call moves more bytes, but its bound is that of a zero-copy call.
    """
    if memory == "shared":
        return "(n+1)S", (ranks + 1) * size
    account = ACCOUNTS[collective]
    return account.formula, account.moved(ranks, size)


def elements(collective: str, ranks: int, size: int, itemsize: int) -> tuple[int, int]:
    """Returns the number of elements of the whole tensor and of a rank's part (nccl-tests'
    count)."""
    if collective == "barrier":
        return 0, 0
    whole = max(size // itemsize, 1)
    if not ACCOUNTS[collective].split:
        return whole, whole
    part = max(whole // ranks, 1)
    return part * ranks, part


@dataclass
class Case:
    """One rank's side of one collective on one pair of buffers.

    Attributes:
        run: makes one call; returns the output if `output` is None.
        input: tensor that a check fills before the call.
        own: values for `input`, one period for each equal part of it.
        expected: the output's values, one period for each equal part of the output; empty if this
            rank's output is undefined.
    """

    run: Callable[[], Any]
    input: torch.Tensor | None
    own: Sequence[torch.Tensor]
    output: torch.Tensor | None
    expected: Sequence[torch.Tensor]

    def wrong(self) -> int:
        """Runs a call on known values and counts the wrong elements on this rank."""
        if self.input is not None:
            _fill(self.input, self.own)
        result = self.run()
        output = result if self.output is None else self.output
        if not self.expected or output is None:
            return 0
        parts = output.view(len(self.expected), -1)
        return sum(
            _differing(part, wanted) for part, wanted in zip(parts, self.expected, strict=True)
        )


def ones_and_zeros(rank: int, offset: int = 0) -> torch.Tensor:
    """Returns one period of rank `rank`'s values from element `offset` on; int64 of shape
    (PERIOD,)."""
    index = (torch.arange(PERIOD) + offset + SHIFT * rank) % PERIOD
    return (index * index % 11) & 1


def _reduced(op: str, ranks: int, offset: int = 0) -> torch.Tensor:
    values = torch.stack([ones_and_zeros(rank, offset) for rank in range(ranks)])
    if op == "product":
        return (values + 1).prod(0)
    if op in ("min", "band"):
        return values.amin(0)
    if op in ("max", "bor"):
        return values.amax(0)
    total = values.sum(0)
    if op == "bxor":
        return total % 2
    return total.double() / ranks if op == "avg" else total


def _fill(tensor: torch.Tensor, periods: Sequence[torch.Tensor]) -> None:
    for part, period in zip(tensor.view(len(periods), -1), periods, strict=True):
        whole = part.numel() // PERIOD * PERIOD
        values = period.to(tensor.dtype)
        part[:whole].view(-1, PERIOD).copy_(values.expand(whole // PERIOD, PERIOD))
        part[whole:].copy_(values[: part.numel() - whole])


def _differing(tensor: torch.Tensor, period: torch.Tensor) -> int:
    """Counts the elements that differ by more than two units in the last place; NaN counts."""
    dtype = tensor.dtype
    wanted = period.to(dtype).double()
    near = 2 * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    wrong = 0
    for start in range(0, tensor.numel(), BLOCK):
        block = tensor[start : start + BLOCK].double()
        values = wanted.repeat(-(-block.numel() // PERIOD))[: block.numel()]
        wrong += int((~((block - values).abs() <= near * values.abs())).sum())
    return wrong


def _operation(op: str) -> Any:
    return getattr(dist.ReduceOp, op.upper())


def build(
    collective: str,
    memory: str,
    dtype: torch.dtype,
    size: int,
    op: str,
    group: dist.ProcessGroup | None = None,
) -> Case:
    """Returns the case on this rank, with zeroed buffers.

    Args:
        memory: "zero-copy" allocates the buffers with `hfreduce.empty`; "shared" also requests a
            shared result.
        size: size in bytes; see the module.
        group: None for the default group.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole, part = elements(collective, ranks, size, dtype.itemsize)

    def allocate(count: int) -> torch.Tensor:
        if memory == "staged":
            return torch.zeros(count, dtype=dtype)
        return hfreduce.empty(count, dtype=dtype).zero_()

    return _BUILDERS[collective](_Place(rank, ranks, whole, part, op, group, memory, allocate))


@dataclass(frozen=True)
class _Place:
    rank: int
    ranks: int
    whole: int
    part: int
    op: str
    group: dist.ProcessGroup | None
    memory: str
    allocate: Callable[[int], torch.Tensor]

    def inputs(self, parts: int = 1) -> list[torch.Tensor]:
        """Returns this rank's values, one period for each part of the input."""
        more = 1 if self.op == "product" else 0
        return [ones_and_zeros(self.rank, p * self.part) + more for p in range(parts)]


def _allreduce(at: _Place) -> Case:
    t = at.allocate(at.whole)
    expected = [_reduced(at.op, at.ranks)]
    if at.memory == "shared":
        allreduce: Any = hfreduce.allreduce
        run = partial(allreduce, t, _operation(at.op), at.group, shared=True)
        return Case(run, t, at.inputs(), None, expected)
    run = partial(dist.all_reduce, t, _operation(at.op), at.group)
    return Case(run, t, at.inputs(), t, expected)


def _allgather(at: _Place) -> Case:
    source, out = at.allocate(at.part), at.allocate(at.whole)
    run = partial(dist.all_gather_single, out, source, at.group)
    return Case(run, source, at.inputs(), out, [ones_and_zeros(r) for r in range(at.ranks)])


def _reduce_scatter(at: _Place) -> Case:
    source, out = at.allocate(at.whole), at.allocate(at.part)
    run = partial(dist.reduce_scatter_single, out, source, _operation(at.op), at.group)
    expected = [_reduced(at.op, at.ranks, at.rank * at.part)]
    return Case(run, source, at.inputs(at.ranks), out, expected)


def _broadcast(at: _Place) -> Case:
    t = at.allocate(at.whole)
    return Case(partial(dist.broadcast, t, 0, at.group), t, at.inputs(), t, [ones_and_zeros(0)])


def _reduce(at: _Place) -> Case:
    t = at.allocate(at.whole)
    run = partial(dist.reduce, t, 0, _operation(at.op), at.group)
    expected = [_reduced(at.op, at.ranks)] if at.rank == 0 else []
    return Case(run, t, at.inputs(), t, expected)


def _alltoall(at: _Place) -> Case:
    source, out = at.allocate(at.whole), at.allocate(at.whole)
    run = partial(dist.all_to_all_single, out, source, None, None, at.group)
    expected = [ones_and_zeros(r, at.rank * at.part) for r in range(at.ranks)]
    return Case(run, source, at.inputs(at.ranks), out, expected)


def _sendrecv(at: _Place) -> Case:
    source, out = at.allocate(at.whole), at.allocate(at.whole)
    following, previous = (at.rank + 1) % at.ranks, (at.rank - 1) % at.ranks

    def run() -> None:
        sent: Any = dist.isend(source, following, at.group)
        received: Any = dist.irecv(out, previous, at.group)
        sent.wait()
        received.wait()

    return Case(run, source, at.inputs(), out, [ones_and_zeros(previous)])


def _barrier(at: _Place) -> Case:
    return Case(partial(dist.barrier, at.group), None, [], None, [])


_BUILDERS: dict[str, Callable[[_Place], Case]] = {
    "allreduce": _allreduce,
    "allgather": _allgather,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "alltoall": _alltoall,
    "sendrecv": _sendrecv,
    "barrier": _barrier,
}
