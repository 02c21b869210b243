"""Buckets: parameters that are reduced together, and the memory of their gradients."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from fireflyer import hfreduce
from fireflyer.haiscale.gradients.shared_memory import uses


class Bucket:
    """Flat tensor, zero-copy on CPU, that holds the gradients of its parameters side by side.

    Attributes:
        number: place in the order in which reductions start; the same on all ranks.
        indexes: indexes of its parameters in the model.
        views: views of the gradients, each shaped like its parameter. `grad` is never one of these
            views, because the script may give the tensor `grad` other memory (`p.grad.data = ...`).
        missing: number of gradients that this backward has not produced yet.
        pieces: parts of `flat`, reduced one after the other. `flat` is cut only if a large
            parameter makes it far larger than a normal bucket. Without the cut, more urgent
            gradients would wait for the whole bucket, because a running reduction cannot be
            interrupted.
        works: reductions of the pieces, from their start until the wait for them has ended.
    """

    def __init__(
        self, number: int, indexes: Sequence[int], parameters: list[nn.Parameter], piece_bytes: int
    ) -> None:
        self.number = number
        self.indexes = list(indexes)
        self.parameters = parameters
        self._piece_bytes = piece_bytes
        self._allocate()
        self.missing = len(parameters)
        self.works: list[dist.Work | None] = []

    def _allocate(self) -> None:
        parameters, first = self.parameters, self.parameters[0]
        sizes = [p.numel() for p in parameters]
        if first.device.type == "cpu":
            self.flat = hfreduce.empty(sum(sizes), dtype=first.dtype)
        else:
            self.flat = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
        self.views = [v.view_as(p) for v, p in zip(self.flat.split(sizes), parameters, strict=True)]
        self.pieces = self.flat.split(max(1, self._piece_bytes // self.flat.itemsize))
        self._own_uses = uses(self.flat)

    def begin(self) -> None:
        """Takes new memory if the script still holds gradients that are no longer any parameter's
        `grad`."""
        if uses(self.flat) > self._own_uses and not any(
            p.grad is not None and p.grad.is_set_to(view)
            for p, view in zip(self.parameters, self.views, strict=True)
        ):
            self._allocate()

    def fill(self, position: int) -> bool:
        """Copies the parameter's gradient, or zero, into the bucket; returns True for a
        gradient."""
        grad, view = self.parameters[position].grad, self.views[position]
        if grad is None:
            view.zero_()
        elif not grad.is_set_to(view):
            view.copy_(grad)
        return grad is not None

    def hand_out(self, position: int) -> None:
        """Makes the bucket's memory the parameter's gradient."""
        parameter, view = self.parameters[position], self.views[position]
        if parameter.grad is None or not parameter.grad.is_set_to(view):
            parameter.grad = view.data
