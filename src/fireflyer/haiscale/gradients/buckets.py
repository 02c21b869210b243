"""Buckets: parameters that are reduced together, and the memory for that."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from fireflyer import hfreduce


class Bucket:
    """One flat tensor, zero-copy on CPU, that holds the gradients of its parameters side by side.

    Attributes:
        number: place in the order in which reductions start; the same on all ranks.
        indexes: indexes of its parameters in the model.
        views: views of the gradients, each shaped like its parameter.
        missing: number of gradients that this backward has not produced yet.
        pieces: parts of `flat`, reduced one after the other. `flat` is cut only if a large
            parameter makes it far larger than a bucket should be. A running reduction cannot be
            interrupted, so more urgent gradients could not overtake it.
        works: reductions of the pieces, from their start until they were waited for.
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
        """Copies the parameter's gradient, or zero, into the bucket; True for a gradient."""
        grad, view = self.parameters[position].grad, self.views[position]
        if grad is None:
            view.zero_()
        elif grad is not view:
            view.copy_(grad)
        return grad is not None
