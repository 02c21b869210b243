"""Which parameters are reduced together, and the memory in which that happens."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from fireflyer import hfreduce


def plan(
    sizes: Sequence[int], kinds: Sequence[object], order: Sequence[int], bucket_bytes: int
) -> list[list[int]]:
    """Cuts parameters into buckets.

    Args:
        sizes: of each parameter, in bytes.
        kinds: only parameters of equal kinds (dtype and device) share a bucket.
        order: their indexes as their gradients become ready.
        bucket_bytes: a bucket is closed when it holds as much.

    Returns:
        Indexes of the parameters of each bucket; buckets in the order in which they become full, so that
        reductions can start in it.
    """
    buckets: list[list[int]] = []
    filling: dict[object, tuple[int, list[int]]] = {}
    for index in order:
        held, members = filling.pop(kinds[index], (0, []))
        members.append(index)
        held += sizes[index]
        if held < bucket_bytes:
            filling[kinds[index]] = (held, members)
        else:
            buckets.append(members)
    place = {index: at for at, index in enumerate(order)}
    buckets += [members for _, members in filling.values()]
    return sorted(buckets, key=lambda members: place[members[-1]])


class Bucket:
    """One flat tensor, zero-copy on CPU, with the gradients of its parameters side by side.

    Attributes:
        number: its place in the order in which reductions start; alike on all ranks.
        indexes: of its parameters, in the model.
        views: of the gradients, each shaped as its parameter.
        missing: gradients that this backward has not brought yet.
        pieces: of `flat`, reduced one after the other. Cut only where it is far larger than a bucket should
            be, because a parameter is: a reduction that runs is not interrupted, and what the next forward
            needs sooner could not pass it.
        works: of the pieces' reductions, from their start until they were waited for.
    """

    def __init__(
        self, number: int, indexes: Sequence[int], parameters: list[nn.Parameter], piece_bytes: int
    ) -> None:
        self.number = number
        self.indexes = list(indexes)
        self.parameters = parameters
        sizes = [p.numel() for p in parameters]
        first = parameters[0]
        if first.device.type == "cpu":
            self.flat = hfreduce.empty(sum(sizes), dtype=first.dtype)
        else:
            self.flat = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
        self.views = [v.view_as(p) for v, p in zip(self.flat.split(sizes), parameters, strict=True)]
        self.missing = len(parameters)
        self.pieces = self.flat.split(max(1, piece_bytes // self.flat.itemsize))
        self.works: list[dist.Work | None] = []

    def fill(self, position: int) -> bool:
        """Brings what its parameter holds into the bucket: its gradient, or zero. Returns which."""
        grad, view = self.parameters[position].grad, self.views[position]
        if grad is None:
            view.zero_()
        elif grad is not view:
            view.copy_(grad)
        return grad is not None
