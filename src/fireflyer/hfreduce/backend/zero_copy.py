"""Zero-copy tensors: memory that collectives reduce in place."""

import math

import torch

from fireflyer._native import hfreduce as native
from fireflyer.hfreduce.backend.compiler_exclusion import uncompiled


@uncompiled
def empty(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns an uninitialised CPU tensor in zero-copy memory, which collectives reduce in place.

    The call is local, not collective. Peers map the memory when a collective first uses it. The
    memory is released when the tensor is destroyed.

    Args:
        shape: sizes of the dimensions, as for `torch.empty`.
        dtype: element type; default `torch.get_default_dtype()`.

    Raises:
        NoSpace: the system refused the shared memory.
        ValueError: a size is negative.
    """
    dtype = dtype or torch.get_default_dtype()
    if any(size < 0 for size in shape):
        raise ValueError(f"sizes must not be negative: {list(shape)}")
    count = math.prod(shape)
    block = torch.from_numpy(native.arena_block(count * dtype.itemsize))
    return block.view(dtype).view(shape)


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor like `empty`, with the shape and dtype of `tensor`."""
    return empty(*tensor.shape, dtype=tensor.dtype)
