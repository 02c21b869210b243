"""HFReduce for torch: zero-copy tensors, collectives with extra options, and the process group."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ReduceOp

from fireflyer.errors import ConfigError
from fireflyer.hfreduce.backend.compiler_exclusion import uncompiled
from fireflyer.hfreduce.backend.process_group import ProcessGroupHFReduce
from fireflyer.hfreduce.backend.tensors import op_named
from fireflyer.hfreduce.backend.zero_copy import empty, empty_like
from fireflyer.hfreduce.registration import register_backend
from fireflyer.hfreduce.wire import Wire
from fireflyer.torch_internals.distributed import AllgatherOptions

__all__ = [
    "ProcessGroupHFReduce",
    "Wire",
    "all_gather",
    "allreduce",
    "empty",
    "empty_like",
    "reduce_scatter",
]


@uncompiled
def allreduce(
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    *,
    shared: bool = False,
    wire: str | Wire | None = None,
    priority: int = 0,
    label: int = 0,
    async_op: bool = False,
) -> Any:
    """Reduces `tensor` in place over all ranks: `torch.distributed.all_reduce` with more options.

    Args:
        tensor: tensor of any shape; zero-copy if `empty` allocated it, staged otherwise.
        op: a `torch.distributed.ReduceOp`.
        group: process group of backend "hfreduce"; None means the default group.
        shared: leave `tensor` unchanged and return the result instead. The result is stored once
            per host and all ranks of the host read it: with n ranks on a host and a tensor of S
            bytes, the call moves (n+1)S bytes instead of 2nS. The result must not be written.
        wire: format of sums between hosts: "bf16", "fp16", "int8", "fp32" (unrounded), or a `Wire`.
            Default: the group's `wire`, else the tensor's dtype.
        priority: order among queued asynchronous operations: higher values run first. The value
            must be the same on all ranks. If it is not 0, `cancel()` of the Work can cancel the
            operation while it is queued.
        label: caller-defined number that identifies the reduced data. Ranks that pass different
            labels fail, as with different sizes, before any data is reduced.
        async_op: return a Work immediately instead of waiting.

    Returns:
        A Work if `async_op` is set; its `result()` is a list of one tensor. Otherwise the shared
        result, or None if `shared` is not set.

    Raises:
        RankFailed: a rank died or did not join within the timeout.
        CollectiveError: the ranks make different calls, or the group is broken.
        ConfigError: the group has another backend.
        ValueError: `priority` is not a signed 32-bit integer, or `label` is not an unsigned 64-bit
            integer.
    """
    pg = _checked(group, priority, label, "allreduce")
    codec = Wire(wire) if isinstance(wire, str) else wire
    work = pg.reduce_tensor(
        tensor, op_named(op), not async_op, priority, codec, bool(shared), label
    )
    if async_op:
        return work
    work.wait()
    return work.result()[0] if shared else None


@uncompiled
def reduce_scatter(
    output: torch.Tensor,
    source: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    *,
    wire: str | Wire | None = None,
    priority: int = 0,
    label: int = 0,
    async_op: bool = False,
) -> Any:
    """Reduces `source` and scatters the result: `reduce_scatter_tensor` of torch with more options.

    Args:
        output: receives this rank's piece of the result.
        source: one piece for each rank, all of equal size; not modified. Both tensors are zero-copy
            if `empty` allocated them.
        op, group, wire, priority, label, async_op: as for `allreduce`. A `Wire` with error feedback
            belongs to one size of `source`.

    Returns:
        A Work if `async_op` is set, else None.

    Raises:
        RankFailed, CollectiveError, ConfigError: as for `allreduce`.
        ValueError: as for `allreduce`, or the sizes do not fit.
    """
    pg = _checked(group, priority, label, "reduce_scatter")
    codec = Wire(wire) if isinstance(wire, str) else wire
    work = pg.reduce_scatter_pieces(
        output, source, op_named(op), not async_op, priority, codec, label
    )
    if async_op:
        return work
    work.wait()
    return None


@uncompiled
def all_gather(
    output: torch.Tensor,
    source: torch.Tensor,
    group: ProcessGroup | None = None,
    *,
    label: int = 0,
    async_op: bool = False,
) -> Any:
    """Gathers every rank's `source`: `torch.distributed.all_gather_into_tensor` with a label.

    Args:
        output: receives the `source` of every rank, in order of rank.
        source: same size on all ranks. Both tensors are zero-copy if `empty` allocated them.
        group, label, async_op: as for `allreduce`.

    Returns:
        A Work if `async_op` is set, else None.

    Raises:
        RankFailed, CollectiveError, ConfigError: as for `allreduce`.
        ValueError: the size of `output` does not fit, or `label` is invalid as for `allreduce`.
    """
    pg = _checked(group, 0, label, "all_gather")
    opts = AllgatherOptions()
    opts.asyncOp = async_op
    work = pg.gather_pieces(output, source, opts, label)
    if async_op:
        return work
    work.wait()
    return None


def _checked(
    group: ProcessGroup | None, priority: int, label: int, caller: str
) -> ProcessGroupHFReduce:
    if not isinstance(priority, int) or not -(2**31) <= priority < 2**31:
        raise ValueError(f"invalid priority {priority!r}: expected a signed 32-bit integer")
    if not isinstance(label, int) or not 0 <= label < 2**64:
        raise ValueError(f"invalid label {label!r}: expected an unsigned 64-bit integer")
    group = group or dist.group.WORLD
    if not isinstance(group, ProcessGroupHFReduce):
        raise ConfigError(f"hfreduce.{caller} needs a process group of backend 'hfreduce'")
    return group


register_backend()
