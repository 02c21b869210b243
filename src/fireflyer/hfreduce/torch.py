"""HFReduce for torch: zero-copy tensors, allreduce with its extras, and the process group."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ReduceOp

from fireflyer._native import hfreduce as native
from fireflyer.errors import ConfigError
from fireflyer.hfreduce import register_backend
from fireflyer.hfreduce.process_group import ProcessGroupHFReduce, op_named

__all__ = ["ProcessGroupHFReduce", "allreduce", "empty", "empty_like"]


def empty(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An uninitialised CPU tensor in zero-copy memory: collectives reduce it where it lies.

    Local, not collective: peers map the memory when they first meet it. It is given back when the tensor
    dies.

    Args:
        shape: sizes of the dimensions, as for `torch.empty`.
        dtype: default `torch.get_default_dtype()`.

    Raises:
        NoSpace: shared memory was refused.
    """
    dtype = dtype or torch.get_default_dtype()
    count = 1
    for size in shape:
        count *= size
    block = torch.from_numpy(native.arena_block(count * dtype.itemsize))
    return block.view(dtype).view(shape)


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """`empty` with the shape and dtype of `tensor`."""
    return empty(*tensor.shape, dtype=tensor.dtype)


def allreduce(
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    *,
    priority: int = 0,
    async_op: bool = False,
) -> dist.Work | None:
    """`torch.distributed.all_reduce`, in place, with what torch has no words for.

    Args:
        tensor: any shape; zero-copy if it came from `empty`, staged otherwise.
        op: a `torch.distributed.ReduceOp`.
        group: of backend "hfreduce"; the default group when None.
        priority: among asynchronous operations that wait, higher ones run first; alike on all ranks.
        async_op: return a Work at once instead of waiting.

    Raises:
        RankFailed: a rank died or did not join within the timeout.
        CollectiveError: the ranks do not call the same thing, or the group is broken.
        ConfigError: the group is of another backend.
    """
    group = group or dist.group.WORLD
    if not isinstance(group, ProcessGroupHFReduce):
        raise ConfigError("hfreduce.allreduce needs a process group of backend 'hfreduce'")
    work = group.reduce_tensor(tensor, op_named(op), inline=not async_op, priority=priority)
    if async_op:
        return work
    work.wait()
    return None


register_backend()
