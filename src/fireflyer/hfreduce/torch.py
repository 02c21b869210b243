"""HFReduce for torch: zero-copy tensors, allreduce with its extras, and the process group."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import ProcessGroup, ReduceOp

from fireflyer._native import hfreduce as native
from fireflyer.errors import ConfigError
from fireflyer.hfreduce import register_backend
from fireflyer.hfreduce.process_group import ProcessGroupHFReduce
from fireflyer.hfreduce.tensors import op_named
from fireflyer.hfreduce.uncompiled import uncompiled
from fireflyer.hfreduce.wire import Wire

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
def empty(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An uninitialised CPU tensor in zero-copy memory: collectives reduce it where it lies.

    Local, not collective: peers map the memory when they first meet it. It is given back when the tensor
    dies.

    Args:
        shape: sizes of the dimensions, as for `torch.empty`.
        dtype: default `torch.get_default_dtype()`.

    Raises:
        NoSpace: shared memory was refused.
        ValueError: a negative size.
    """
    dtype = dtype or torch.get_default_dtype()
    if any(size < 0 for size in shape):
        raise ValueError(f"sizes must not be negative: {list(shape)}")
    count = math.prod(shape)
    block = torch.from_numpy(native.arena_block(count * dtype.itemsize))
    return block.view(dtype).view(shape)


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """`empty` with the shape and dtype of `tensor`."""
    return empty(*tensor.shape, dtype=tensor.dtype)


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
    """`torch.distributed.all_reduce`, in place, with what torch has no words for.

    Args:
        tensor: any shape; zero-copy if it came from `empty`, staged otherwise.
        op: a `torch.distributed.ReduceOp`.
        group: of backend "hfreduce"; the default group when None.
        shared: leave `tensor` as it is and give back the result instead, which lies once a host and is
            read by all its ranks: (n+1)S bytes are moved instead of 2nS. It must not be written.
        wire: how sums travel between hosts: "bf16", "fp16", "int8", "fp32" (unrounded), or a `Wire`. Default:
            the group's `wire`, else the tensor's dtype.
        priority: among asynchronous operations that wait, higher ones run first; alike on all ranks. Such an
            operation can be cancelled while it waits, by `cancel()` of its Work.
        label: a number of the caller's for what is reduced. Ranks that call with different ones disagree, as
            with different sizes, before a byte is added.
        async_op: return a Work at once instead of waiting.

    Returns:
        With `async_op` a Work, whose `result()` is a list of one tensor. Else None, or the shared result.

    Raises:
        RankFailed: a rank died or did not join within the timeout.
        CollectiveError: the ranks do not call the same thing, or the group is broken.
        ConfigError: the group is of another backend.
        ValueError: a priority that is no integer of 32 bits, or a label that is none of 64 bits from 0 on.
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
    """`torch.distributed.reduce_scatter_tensor`, with what torch has no words for.

    Args:
        output: takes this rank's piece of the result.
        source: as many equal pieces as ranks; not modified. Both are zero-copy if they came from `empty`.
        op, group, wire, priority, label, async_op: as for `allreduce`. A `Wire` with error feedback belongs
            to one size of `source`.

    Returns:
        With `async_op` a Work, else None.

    Raises:
        RankFailed, CollectiveError, ConfigError: as `allreduce`.
        ValueError: as `allreduce`, or sizes that do not fit.
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
    """`torch.distributed.all_gather_into_tensor`, with a label.

    Args:
        output: takes everybody's `source`, side by side.
        source: of one size on all ranks. Both are zero-copy if they came from `empty`.
        group, label, async_op: as for `allreduce`.

    Returns:
        With `async_op` a Work, else None.

    Raises:
        RankFailed, CollectiveError, ConfigError: as `allreduce`.
        ValueError: an output that does not fit, or a label as for `allreduce`.
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
        raise ValueError(f"priority={priority!r}: not an integer of 32 bits")
    if not isinstance(label, int) or not 0 <= label < 2**64:
        raise ValueError(f"label={label!r}: not an integer of 64 bits from 0 on")
    group = group or dist.group.WORLD
    if not isinstance(group, ProcessGroupHFReduce):
        raise ConfigError(f"hfreduce.{caller} needs a process group of backend 'hfreduce'")
    return group


register_backend()
