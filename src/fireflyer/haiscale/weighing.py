"""The mean over the samples of a global batch, where ranks have unequal parts; and a word to all ranks.

Both ride on the reduction that ends each backward anyway, in its *tail* (`leaving.Tail`), which is
reduced with MAX. Byte 0 says that newcomers wait at the member; then each rank has 8 bytes for its
weight, which the others leave zero.

A gradient is multiplied by w/v before it is averaged over the ranks, w being this rank's weight and v the
ranks' mean weight, so that the average is sum(w g) / sum(w). v is known only when all tails have come: until
then the mean of the backward before stands in, and what it was wrong by is made up for on arrival. Equal
weights thus cost nothing, and what travels has the size of a gradient (an fp16 wire does not overflow).
"""

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from fireflyer import hfreduce
from fireflyer.errors import ConfigError


class Weighing:
    """What a wrapper does to gradients before and after it averages them over `group`.

    For each synchronised backward, in this order: `open` on all ranks; `scale` for every flat gradient, then
    its reduction with AVG; the reduction of a tail, `write` before and `read` after it; `correct` for every
    gradient that has arrived.

    Attributes:
        weight: samples of this rank in the step; may be set until the backward begins.
        newcomers: some rank's byte 0 of the last tail.
    """

    def __init__(self, group: hfreduce.ProcessGroupHFReduce) -> None:
        self._group = group
        self.reset(lambda: False)

    def reset(self, newcomers_wait: Callable[[], bool]) -> None:
        """The group has other members, of whose weights nothing is known.

        Args:
            newcomers_wait: whether they wait at this member.
        """
        self.weight = 1
        self.newcomers = False
        self._newcomers_wait = newcomers_wait
        self._rank, self._world = self._group.rank(), self._group.size()
        self._reference = 0  # the sum of weights that stands in; 0: none yet
        self._own = 1  # the weight in this backward
        self._correction = 1.0

    @property
    def tail_bytes(self) -> int:
        return 1 + 8 * self._world

    def open(self) -> None:
        """A backward begins. Collective the first time.

        Raises:
            ConfigError: a weight that is no number of samples.
        """
        if type(self.weight) is not int or not 0 <= self.weight < 2**48:
            raise ConfigError(f"weight={self.weight!r}: not a number of samples")
        self._own = self.weight
        if not self._reference:
            total = torch.tensor(self._own)
            dist.all_reduce(total, group=self._group)
            self._reference = int(total)

    def scale(self, gradient: torch.Tensor) -> None:
        """Before its reduction."""
        if self._own == 0:
            gradient.zero_()  # a mean over no samples is not a number
        elif self._own * self._world != self._reference:
            gradient.mul_(self._own * self._world / self._reference)

    def write(self) -> bytes:
        """This rank's tail."""
        weights = [self._own if rank == self._rank else 0 for rank in range(self._world)]
        words = b"".join(weight.to_bytes(8, sys.byteorder) for weight in weights)
        return bytes([self._newcomers_wait()]) + words

    def read(self, tail: bytes) -> None:
        """The tail of all ranks."""
        self.newcomers = bool(tail[0])
        total = sum(memoryview(tail[1:]).cast("Q"))
        self._correction = self._reference / total if total else 0.0
        self._reference = total

    def correct(self, gradient: torch.Tensor) -> None:
        """After its reduction, and after `read`."""
        if self._correction != 1.0:
            gradient.mul_(self._correction)
