"""Communication of shards, which replaces `fully_shard`'s own.

`fully_shard` waits for the Work of an all-gather. However, `fully_shard` reads the output of a
reduce-scatter, and of the all-reduce between replicas, as soon as the call returns. Here both calls
return while their operations are in flight; `gradients` ensures that no code reads the output too
early.
"""

import concurrent.futures
import datetime
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ReduceOp

from fireflyer import hfreduce
from fireflyer.errors import CollectiveError
from fireflyer.haiscale.mesh import DataLayout
from fireflyer.haiscale.reporting.spans import span
from fireflyer.haiscale.reporting.times import CommunicationTimer, Times
from fireflyer.torch_internals.sharding import AllGather, ReduceScatter

NO_LIMIT = datetime.timedelta(0)


class ZeroCopy:
    """Part of torch's custom collectives that allocates their memory: zero-copy on the CPU."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        sizes = [int(one) for one in size]
        if device.type == "cpu":
            return hfreduce.empty(*sizes, dtype=dtype)
        return torch.empty(sizes, dtype=dtype, device=device)


@dataclass(frozen=True)
class Label:
    """Label that ranks compare to verify that they gather and reduce the same unit.

    Attributes:
        number: number of the unit, starting at 1; the same on all ranks.
        units: names of all units, in the order of their numbers.
    """

    number: int
    units: Sequence[str]

    @property
    def unit(self) -> str:
        """Name of the unit."""
        return self.units[self.number - 1]

    def named(self, error: CollectiveError) -> CollectiveError:
        """Returns the error with units' names instead of labels, if its message names labels."""
        text = re.sub(r"label (\d+)", self._name, str(error))
        if type(error) is not CollectiveError or text == str(error):
            return error
        return CollectiveError(f"{text}; all ranks must run the same units in the same order")

    def _name(self, found: "re.Match[str]") -> str:
        number = int(found[1])
        return f"unit {self.units[number - 1]!r}" if number <= len(self.units) else found[0]


class GatherWork(dist.Work):
    """An all-gather in flight. Records the time of waits; widens values sent in a narrower type.

    Args:
        narrow: tensor in which the values arrive, unless they arrive in `output`.
        label: label of the gathered unit.
    """

    def __init__(
        self,
        work: dist.Work,
        times: Times,
        under_way: CommunicationTimer,
        output: torch.Tensor,
        narrow: torch.Tensor | None,
        label: Label,
    ) -> None:
        super().__init__()
        self._label = label
        self._work, self._times = work, times
        self._under_way: CommunicationTimer | None = under_way
        under_way.begin()
        self._output, self._narrow = output, narrow

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self, timeout: datetime.timedelta = NO_LIMIT) -> bool:
        begun = self._times.clock()
        try:
            with span("wait", "unit", self._label.unit):
                self._work.wait(timeout)
        except CollectiveError as error:
            raise self._label.named(error) from error.__cause__
        self._times.exposed_s += self._times.clock() - begun
        if self._under_way is not None:
            self._under_way.end()
            self._under_way = None
        if self._narrow is not None:
            self._output.copy_(self._narrow)
            self._narrow = None
        return True


@dataclass
class Gather(ZeroCopy, AllGather):
    """All-gathers of parameters into zero-copy memory.

    Attributes:
        narrow: type to which wider floating-point values are rounded for the transfer; None: no
            rounding.
        label: label of the unit.
    """

    times: Times
    under_way: CommunicationTimer
    narrow: torch.dtype | None
    label: Label

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        narrow = None
        target, source = output_tensor, input_tensor
        dtype = output_tensor.dtype
        if self.narrow and dtype.is_floating_point and dtype.itemsize > self.narrow.itemsize:
            target = narrow = self.allocate(
                output_tensor.shape, dtype=self.narrow, device=output_tensor.device
            )
            source = narrow.chunk(group.size())[group.rank()]
            source.copy_(input_tensor)
        with span("all_gather", "unit", self.label.unit):
            started = hfreduce.all_gather(
                target, source, group, label=self.label.number, async_op=True
            )
        work = GatherWork(started, self.times, self.under_way, output_tensor, narrow, self.label)
        if async_op:
            return work
        work.wait()
        return None


class ChainedWork(dist.Work):
    """Work that another thread starts when its predecessor has ended."""

    def __init__(self, begun: "concurrent.futures.Future[dist.Work]") -> None:
        super().__init__()
        self._begun = begun

    def is_completed(self) -> bool:
        if not self._begun.done():
            return False
        return self._begun.exception() is not None or self._begun.result().is_completed()

    def wait(self, timeout: datetime.timedelta = NO_LIMIT) -> bool:
        return bool(self._begun.result().wait(timeout))


class Channels:
    """Starts the reductions of sharded gradients, without waiting for them.

    Over one dimension, a reduction is a reduce-scatter. With replicas, an all-reduce of the shard
    follows; a thread of this object starts it as soon as the reduce-scatter has ended.

    Every rank starts the same reductions in the same order.
    """

    def __init__(self, layout: DataLayout, wire: str | None) -> None:
        self._layout = layout  # keeps the layout's groups alive
        self._reduce, self._replicate, self._wire = layout.reduce, layout.replicate, wire
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None

    def close(self) -> None:
        """Ends the thread. Requires that nothing is in flight, or that the groups have ended."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def scatter(
        self, output: torch.Tensor, source: torch.Tensor, priority: int, label: int
    ) -> dist.Work:
        """Starts the average of all ranks' `source`; `output` receives this rank's piece."""
        ordered = self._replicate is not None  # the replicas' reductions follow in this order
        work: dist.Work = hfreduce.reduce_scatter(
            output,
            source,
            ReduceOp.AVG,
            self._reduce,
            wire=self._wire,
            priority=0 if ordered else priority,
            label=label,
            async_op=True,
        )
        return work

    def replicate(
        self, before: dist.Work | None, shard: torch.Tensor, priority: int, label: int
    ) -> dist.Work:
        """Starts the average over the replicas, in place, once `before` has ended."""
        return self._then(before, shard, ReduceOp.AVG, priority, label)

    def most(self, mask: torch.Tensor, priority: int) -> dist.Work:
        """Starts the maximum over all ranks, in place."""
        before: dist.Work = hfreduce.allreduce(
            mask,
            ReduceOp.MAX,
            self._reduce,
            priority=priority if self._replicate is None else 0,
            async_op=True,
        )
        if self._replicate is None:
            return before
        return self._then(before, mask, ReduceOp.MAX, priority)

    def _then(
        self,
        before: dist.Work | None,
        tensor: torch.Tensor,
        op: Any,
        priority: int,
        label: int = 0,
    ) -> dist.Work:
        group = self._replicate

        def begin() -> dist.Work:
            if before is not None:
                before.wait()
            work: dist.Work = hfreduce.allreduce(
                tensor,
                op,
                group,
                wire=self._wire,
                priority=priority,
                label=label,
                async_op=True,
            )
            return work

        if self._thread is None:
            self._thread = concurrent.futures.ThreadPoolExecutor(1, "haiscale-replicate")
        return ChainedWork(self._thread.submit(begin))


@dataclass
class Scatter(ZeroCopy, ReduceScatter):
    """Passes the reduce-scatter of one parameter group to `start(output, source)`."""

    start: Callable[[torch.Tensor, torch.Tensor], None]

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.start(output_tensor, input_tensor)
        return None


class Replication(ProcessGroup):
    """Passes `fully_shard`'s all-reduce of a shard between replicas to `start(shard)`."""

    def __init__(self, group: ProcessGroup, start: Callable[[torch.Tensor], None]) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self._start = start

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        (shard,) = tensors
        self._start(shard)
        return None
