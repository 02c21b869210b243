"""Checks that all ranks agree before a reduction, and copies from the first rank."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup, ReduceOp

from fireflyer import hfreduce
from fireflyer.errors import CollectiveError, ConfigError
from fireflyer.haiscale.torch_state import isolated_torch_state
from fireflyer.torch_internals.core import preserve_versions

Options = Mapping[str, object]
"""Arguments of a wrapper by name; compared by their `repr`."""
NO_OPTIONS: Options = {}


def check_alike(module: nn.Module, group: ProcessGroup, options: Options = NO_OPTIONS) -> None:
    """Checks that all ranks have the same parameters and buffers. Collective.

    The check compares names, shapes, dtypes, and which parameters require gradients.

    Args:
        options: arguments that must also be the same on all ranks.

    Raises:
        ConfigError: the ranks differ; raised on every rank; the error names the difference and the
            ranks.
    """
    own = described(module, options)
    mine = torch.tensor(list(digest_of(own)), dtype=torch.uint8)
    all_digests = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_digests, mine, group)
    differing = [
        rank for rank, other in enumerate(all_digests) if not torch.equal(other, all_digests[0])
    ]
    if not differing:
        return
    first, other = (description_of(rank, own, group) for rank in (0, differing[0]))
    raise ConfigError(
        f"the model and its options must be equal on all ranks: {difference(first, other, differing[0])}"
        + (f"; ranks {differing} differ from rank 0" if len(differing) > 1 else "")
    )


def described(module: nn.Module, options: Options = NO_OPTIONS) -> list[str]:
    """Returns a line for each option, parameter and buffer: name, shape, dtype, "frozen"."""
    given = [f"{name}={value!r}" for name, value in options.items()]
    parameters = [
        f"parameter {name} {tuple(p.shape)} {p.dtype}" + ("" if p.requires_grad else " frozen")
        for name, p in module.named_parameters()
    ]
    return [*given, *parameters] + [
        f"buffer {name} {tuple(b.shape)} {b.dtype}" for name, b in module.named_buffers()
    ]


def tell_all(words: Any, group: ProcessGroup) -> list[Any]:
    """Returns the `words` of each rank of the group, as JSON types. Collective."""
    own = torch.tensor(list(json.dumps(words).encode()), dtype=torch.uint8)
    world = dist.get_world_size(group)
    sizes = [torch.zeros((), dtype=torch.int64) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor(len(own)), group)
    texts = [torch.empty(int(size), dtype=torch.uint8) for size in sizes]
    dist.all_gather(texts, own, group)
    return [json.loads(bytes(text.tolist())) for text in texts]


def description_of(rank: int, own: list[str], group: ProcessGroup) -> list[str]:
    """Returns the description of one rank. Collective."""
    root = dist.get_global_rank(group, rank)
    text = torch.tensor(list(json.dumps(own).encode()), dtype=torch.uint8)
    size = torch.tensor(len(text))
    dist.broadcast(size, root, group)
    if dist.get_rank(group) != rank:
        text = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(text, root, group)
    told: list[str] = json.loads(bytes(text.tolist()))
    return told


def difference(first: Sequence[str], other: Sequence[str], rank: int, lead: int = 0) -> str:
    """Returns a sentence about the first difference between two ranks' descriptions.

    Args:
        first, other: descriptions of the ranks `lead` and `rank`.
    """
    for ours, theirs in zip(first, other, strict=False):
        if ours != theirs:
            return f"rank {lead} has {ours}, rank {rank} has {theirs}"
    more, who = (first, lead) if len(first) > len(other) else (other, rank)
    return f"only rank {who} has {more[min(len(first), len(other))]}"


def digest_of(lines: Sequence[str]) -> bytes:
    """Returns 32 bytes that are equal for equal lines."""
    return hashlib.sha256(json.dumps(list(lines)).encode()).digest()


def copy_from_first(tensors: Iterable[torch.Tensor], group: ProcessGroup) -> None:
    """Overwrites `tensors` with those of the group's first rank, byte for byte. Collective."""
    root = dist.get_global_rank(group, 0)
    # No detach(): a small operation keeps its tensor after the wait, and gradients/shared_memory.py
    # would count a kept alias as memory that the script shares.
    with torch.no_grad():
        works = [dist.broadcast(one, src=root, group=group, async_op=True) for one in tensors]
    for work in works:
        assert work is not None
        work.wait()


class BufferCopy:
    """Copies the first rank's buffers to all other ranks at the start of a forward.

    The copy is a reduction of bytes to which the other ranks contribute zeros, because a reduction
    can have a priority. A broadcast would wait for every gradient queued before it. The first rank
    does not wait for the copy.

    Args:
        module: the module whose buffers are copied; they are looked up for each copy, because a
            module may replace them.
        priority: priority of the reduction; see `hfreduce.allreduce`.

    Attributes:
        due: True if the next forward copies, because the previous forward ran with gradients and
            its backward reduces them. torch's wrapper has the same rule, so a forward is collective
            in the same cases.
    """

    def __init__(self, module: nn.Module, group: ProcessGroup, priority: int) -> None:
        self._module, self._group, self._priority = module, group, priority
        self._first = dist.get_rank(group) == 0
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._work: dist.Work | None = None
        self.due = True

    def before_forward(self, synchronise: bool) -> None:
        """Copies the buffers if a copy is due. Collective in that case.

        Args:
            synchronise: True if the backward of this forward reduces gradients.
        """
        due, self.due = self.due, synchronise and torch.is_grad_enabled()
        buffers = list(self._module.buffers()) if due else []
        if buffers:
            with isolated_torch_state(), torch.no_grad():
                self._copy(buffers)

    def _copy(self, buffers: Sequence[torch.Tensor]) -> None:
        if self._work is not None:
            self._work.wait()  # the first rank's previous copy still reads the memory
        sizes = [buffer.nbytes for buffer in buffers]
        if len(self._bytes) != sum(sizes):
            self._bytes = hfreduce.empty(sum(sizes), dtype=torch.uint8)
        pieces = self._bytes.split(sizes)
        if self._first:
            for buffer, piece in zip(buffers, pieces, strict=True):
                piece.copy_(bytes_of(buffer))
        else:
            self._bytes.zero_()
        self._work = hfreduce.allreduce(
            self._bytes, ReduceOp.BOR, self._group, priority=self._priority, async_op=True
        )
        if self._first:
            return
        try:
            self._work.wait()
        except CollectiveError as error:
            error.add_note(
                "The first rank's buffers are copied before a forward. If a buffer may have another "
                "size on each rank, pass broadcast_buffers=False."
            )
            raise
        # A backward through an earlier forward rejects buffers with a newer version, so the copy
        # keeps the versions.
        with preserve_versions(tuple(buffers)):
            for buffer, piece in zip(buffers, pieces, strict=True):
                values = piece.clone()  # a view of another type needs an aligned address
                buffer.copy_(values.view(buffer.dtype).view(buffer.shape))


def bytes_of(tensor: torch.Tensor | np.ndarray[Any, Any]) -> torch.Tensor:
    """Returns the tensor's memory as a flat uint8 tensor; a copy if the tensor is not dense CPU
    memory."""
    if isinstance(tensor, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8))
    return tensor.resolve_conj().resolve_neg().contiguous().cpu().view(-1).view(torch.uint8)
