"""Sample weights for ranks with unequal parts of a global batch, and a flag for waiting newcomers.

The reduction that ends each backward carries both in its *tail* (`suspend_vote.MaskTail`), which is
reduced with MAX. Byte 0 is 1 if newcomers wait at the member that wrote the tail. After that, each
rank has 8 bytes for its weight; the other ranks leave these bytes zero.

The gradient becomes the mean over all samples. Let w be this rank's weight and v the ranks' mean
weight. A gradient is multiplied by w/v before the average over the ranks, so the average is sum(w
g) / sum(w). v is known only when all tails have arrived. Until then the mean of the previous
backward is used, and the gradients are corrected on arrival. So equal weights cost nothing, and the
values sent have the magnitude of gradients (an fp16 wire does not overflow).
"""

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from fireflyer import hfreduce
from fireflyer.errors import ConfigError


class SampleWeights:
    """Scales a wrapper's gradients before and after it averages them over `group`.

    Order for each synchronised backward: `open` on all ranks; `scale` for every flat gradient, then
    the gradient's reduction with AVG; the reduction of a tail, with `write` before it and `read`
    after it; `correct` for every gradient that has arrived.

    Attributes:
        weight: number of samples of this rank in the step; may be set until the backward begins.
        newcomers: True if some rank set byte 0 of the last tail.
    """

    def __init__(self, group: hfreduce.ProcessGroupHFReduce) -> None:
        self._group = group
        self.reset(lambda: False)

    def reset(self, newcomers_wait: Callable[[], bool]) -> None:
        """Starts over with changed members, whose weights are unknown.

        Args:
            newcomers_wait: returns True if newcomers wait at this member.
        """
        self.weight = 1
        self.newcomers = False
        self._newcomers_wait = newcomers_wait
        self._rank, self._world = self._group.rank(), self._group.size()
        self._reference = 0  # the assumed sum of weights; 0: not yet known
        self._own = 1  # this rank's weight in this backward
        self._correction = 1.0

    @property
    def tail_bytes(self) -> int:
        return 1 + 8 * self._world

    def open(self) -> None:
        """Begins a backward. Collective in the first backward after `reset`.

        Raises:
            ConfigError: the weight is not a number of samples.
        """
        if type(self.weight) is not int or not 0 <= self.weight < 2**48:
            raise ConfigError(f"invalid weight {self.weight!r}: expected a number of samples")
        self._own = self.weight
        if not self._reference:
            total = torch.tensor(self._own)
            dist.all_reduce(total, group=self._group)
            self._reference = int(total)

    def scale(self, gradient: torch.Tensor) -> None:
        """Scales a gradient before its reduction."""
        if self._own == 0:
            gradient.zero_()  # a mean over no samples is NaN
        elif self._own * self._world != self._reference:
            gradient.mul_(self._own * self._world / self._reference)

    def write(self) -> bytes:
        """Returns this rank's tail."""
        weights = [self._own if rank == self._rank else 0 for rank in range(self._world)]
        words = b"".join(weight.to_bytes(8, sys.byteorder) for weight in weights)
        return bytes([self._newcomers_wait()]) + words

    def read(self, tail: bytes) -> None:
        """Reads the reduced tail of all ranks."""
        self.newcomers = bool(tail[0])
        total = sum(memoryview(tail[1:]).cast("Q"))
        self._correction = self._reference / total if total else 0.0
        self._reference = total

    def correct(self, gradient: torch.Tensor) -> None:
        """Corrects a gradient after its reduction and after `read`."""
        if self._correction != 1.0:
            gradient.mul_(self._correction)
