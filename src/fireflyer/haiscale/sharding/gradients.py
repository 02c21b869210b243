"""Gradient reducer of sharded models: starts units' reductions, waits for them, and steps units.

A unit is one parameter group of `fully_shard`: one all-gather, one reduce-scatter. States in a
step:

    sharded --(the turn of its module, or of the previous module)--> gathered --(backward)--> reducing
    reducing --(synchronous: at the end of backward; deferred: at first use)--> arrived
    arrived --(deferred, and the script has called optimizer.step())--> stepped

Invariants: all ranks reduce the same units in the same order, then a mask of the parameters that
    any rank's backward reached. All-gathers start in the order of use, independently of arrivals.
    During backward all ranks wait for the same reductions at the same places. Where a rank waits
    depends only on the reductions that it has started, never on those that have arrived. In
    deferred mode, the newest queued reduction runs first, in the order that rank 0 decides. If
    another rank waited for an older reduction before it started the newest, both would wait
    forever. The output of a reduction is not read before the wait; `Sharding._reads_at_once` lists
    the cases in which `fully_shard` itself would read it. Single-threaded, like `reducer`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from fireflyer import hfreduce
from fireflyer.errors import CollectiveError, ConfigError, WireError
from fireflyer.haiscale.gradients import deferred, deferred_shard
from fireflyer.haiscale.gradients.reducer import FIRST
from fireflyer.haiscale.gradients.sample_weights import SampleWeights
from fireflyer.haiscale.gradients.split_optimizer import SplitOptimizer
from fireflyer.haiscale.gradients.suspend_vote import MaskTail, SuspendVote
from fireflyer.haiscale.mesh import DataLayout
from fireflyer.haiscale.reporting.spans import span
from fireflyer.haiscale.reporting.times import CommunicationTimer, Times
from fireflyer.haiscale.sharding.communication import Channels, Gather, Label, Replication, Scatter
from fireflyer.haiscale.torch_state import isolated_torch_state
from fireflyer.log import get_logger
from fireflyer.torch_internals.core import current_graph_task_id, queue_callback
from fireflyer.torch_internals.sharding import TrainingState

assert deferred_shard.DeferredShard in deferred.CLASSES.values()
_log = get_logger("haiscale")


class Mask:
    """Mask, in flight, of the parameters that any rank's backward reached."""

    def __init__(self, used: bytearray, channels: Channels, priority: int, tail: MaskTail) -> None:
        told = used + tail.write()
        self._parameters, self._tail = len(used), tail
        self._mask = hfreduce.empty(len(told), dtype=torch.uint8)
        self._mask.copy_(torch.frombuffer(told, dtype=torch.uint8))
        self._work: dist.Work | None = channels.most(self._mask, priority)
        self._reached: list[int] = []

    def reached(self) -> list[int]:
        """Waits, then returns one number per parameter; 0 means not reached."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            told = self._mask.numpy().tobytes()
            self._reached = list(told[: self._parameters])
            self._tail.read(told[self._parameters :])
        return self._reached


class ShardReduction:
    """Reduction in flight; the owner of a unit's pending parameters.

    Attributes:
        trained: trained parameters at the start, with their numbers; some may since have been
            frozen or thawed.
        fresh: for each trained parameter, True if it had no gradient before.
        mask: mask of the same backward; set at the backward's end.
    """

    def __init__(self, owner: "Sharding", unit: "Unit", work: dist.Work, fresh: list[bool]) -> None:
        self._owner, self._unit, self._work = owner, unit, work
        self.trained, self.fresh = unit.trained(), fresh
        self.mask: Mask | None = None
        self.stepping = False
        self._away = True
        owner.under_way.begin()

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for _, p in self.trained]

    def arrive(self) -> None:
        self._owner.arrive(self._unit)

    def over(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> None:
        try:
            with span("wait", "unit", self._unit.label.unit):
                self._work.wait()
        except CollectiveError as error:
            raise self._unit.label.named(error) from error.__cause__
        if self._away:
            self._away = False
            self._owner.under_way.end()

    def chain(self, begin: Callable[[dist.Work], dist.Work]) -> None:
        """Appends an operation that follows the operation in flight."""
        self._work = begin(self._work)


class Unit:
    """One parameter group of `fully_shard`.

    Args:
        group: torch's `FSDPParamGroup`.
        first: number of the unit's first parameter among the parameters of all units.
        names: names of the unit's parameters.
        label: label that ranks compare.
    """

    def __init__(self, group: Any, first: int, names: Sequence[str], label: Label) -> None:
        self.group, self.first, self.names, self.label = group, first, list(names), label
        self.flight: ShardReduction | None = None
        self.watched: set[int] = set()
        self.factor: float | None = None  # divisor that `fully_shard` applies to gradients
        self._gathered: list[int] = []

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Sharded parameters, regardless of those that the module shows at the moment."""
        return [one.sharded_param for one in self.group.fsdp_params]

    def trained(self) -> list[tuple[int, nn.Parameter]]:
        """Returns the trained parameters with their numbers among those of all units."""
        return [(self.first + i, p) for i, p in enumerate(self.parameters) if p.requires_grad]

    def note_versions(self) -> None:
        self._gathered = self._versions()

    def is_stale(self) -> bool:
        """Returns True if the shards have changed since they were gathered."""
        return bool(self.group.is_unsharded) and self._gathered != self._versions()

    def _versions(self) -> list[int]:
        """Returns version counters; a DTensor's counter is independent of the counter of its local
        part."""
        both = [(one.sharded_param, one._sharded_local_tensor) for one in self.group.fsdp_params]
        return [tensor._version for pair in both for tensor in pair]


class Sharding:
    """Reduces the units' gradients and steps the units.

    Args:
        check_gradients, backlog: see `FullyShardedDataParallel`.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        channels: Channels,
        times: Times,
        check_gradients: bool,
        backlog: int,
    ) -> None:
        self.times = times
        self.leaving = SuspendVote(None)
        """Vote of the ranks on leaving the run, which has one byte of each mask."""
        self._check_gradients, self._limit = check_gradients, backlog
        self._split: SplitOptimizer | None = None
        self.sample_weights: SampleWeights | None = None
        """Sample weights in elastic training, where gradients are means over samples."""
        self.take(units, channels)

    def start_deferring(self, optimizer: torch.optim.Optimizer) -> None:
        """Switches to deferred mode: the first use of a unit's parameters waits for its gradients,
        and steps them if the script has called `step()`."""
        self._split = SplitOptimizer(
            optimizer, self._in_flight, self.settle, self.times, lambda _: True
        )

    def take(self, units: Sequence[Unit], channels: Channels) -> None:
        """Adopts these units; no operation of earlier units may be in flight."""
        self.units = list(units)
        self.leaving.forget()
        self.under_way = CommunicationTimer(self.times)
        self.in_backward = False
        self._channels = channels
        self._used = bytearray(sum(len(unit.names) for unit in units))
        self._issued = 0
        self._backlog: list[ShardReduction] = []
        self._failed: Exception | None = None
        self._torn = False

    def half_way(self) -> bool:
        """Returns True if a forward or a backward has begun and not ended."""
        groups = [unit.group for unit in self.units]
        idle = all(
            group._training_state == TrainingState.IDLE and group._all_gather_result is None
            for group in groups
        )
        return self.in_backward or not idle

    def discard(self) -> bool:
        """Drops operations in flight and gradients, without waiting.

        Requires that the groups have ended. Call `take` afterwards.

        Returns:
            True if this rank's shards contain only complete steps: no update was dropped.
        """
        for unit in self.units:
            flight, unit.flight = unit.flight, None
            deferred.restore(unit.parameters)
            self._torn = self._torn or (flight is not None and flight.stepping)
            for parameter in unit.parameters:
                parameter.grad = None
        self._backlog.clear()
        self._channels.close()
        return not self._torn

    # Backward

    def watch(self, unit: Unit) -> None:
        """Hooks the unit's unsharded parameters, to record those that backward reaches."""
        for number, one in enumerate(unit.group.fsdp_params, unit.first):
            if number not in unit.watched and one._unsharded_param.requires_grad:
                unit.watched.add(number)
                one._unsharded_param.register_post_accumulate_grad_hook(self._reach(number))

    def _reach(self, number: int) -> Callable[[torch.Tensor], None]:
        used = self._used  # not self: garbage collection misses cycles through a tensor's hooks

        def reached(_: torch.Tensor) -> None:
            used[number] = 1

        return reached

    def before_forward(self) -> None:
        if self.in_backward and current_graph_task_id() == -1:
            raise CollectiveError(
                "an earlier backward failed half way and the ranks may disagree: end this process group"
            )

    def _begin_backward(self) -> None:
        self.settle()
        self.leaving.learn()
        self._issued = 0
        self._backlog.clear()
        if self.sample_weights is not None:
            self.sample_weights.open()
        self.in_backward = True
        queue_callback(self._finish)

    def scatter(self, unit: Unit, output: torch.Tensor, source: torch.Tensor) -> None:
        """Starts the unit's reduce-scatter; `fully_shard` then continues with `output`."""
        self._begin(unit)
        if self.sample_weights is not None:
            self.sample_weights.scale(source)
        if self._check_gradients:
            self._check(unit, source)
        group = unit.group
        with span("reduce_scatter", "unit", unit.label.unit):
            work = self._channels.scatter(output, source, self._priority(), unit.label.number)
        flight = self._take_off(unit, work)
        if (
            not group._is_hsdp
            or not group.all_reduce_grads
            or group._partial_reduce_output is not None
        ):
            self._wait_if_read(unit, flight, output)

    def replicate(self, unit: Unit, shard: torch.Tensor) -> None:
        """Starts the sum over replicas, either of the result of `scatter` or of whole gradients.

        An error here is raised only at the end of backward. torch would raise another exception
        instead of the error, because torch cannot log errors of a group that it does not know.
        """
        try:
            with span("all_reduce", "unit", unit.label.unit):
                self._replicate(unit, shard)
        except (CollectiveError, WireError) as error:
            self._failed = self._failed or error

    def _replicate(self, unit: Unit, shard: torch.Tensor) -> None:
        if unit.group._reduce_scatter_process_group.size() == 1:
            self._begin(unit)
            if self.sample_weights is not None:
                self.sample_weights.scale(shard)
            work = self._channels.replicate(None, shard, self._priority(), unit.label.number)
            flight = self._take_off(unit, work)
        else:
            assert unit.flight is not None
            flight, priority, label = unit.flight, self._priority(), unit.label.number
            flight.chain(lambda before: self._channels.replicate(before, shard, priority, label))
        self._wait_if_read(unit, flight, shard)

    def _begin(self, unit: Unit) -> None:
        if unit.group.gradient_divide_factor != unit.factor:
            raise ConfigError(
                "set_gradient_divide_factor is not supported, gradients are averages: scale the loss"
            )
        if not self.in_backward:
            self._begin_backward()
        if self._issued >= self._limit:
            self._await(self._backlog[-1])
        self._issued += 1

    def _priority(self) -> int:
        return self._issued if self._split is not None else 0

    def _take_off(self, unit: Unit, work: dist.Work) -> ShardReduction:
        if unit.flight is not None:  # from an earlier use of the same module
            self._await(unit.flight)
            fresh = unit.flight.fresh
        else:
            fresh = [p.grad is None for _, p in unit.trained()]
        flight = unit.flight = ShardReduction(self, unit, work, fresh)
        for one in self._backlog:
            if one.over():
                one.wait()  # releases its memory
        self._backlog.append(flight)
        return flight

    def _wait_if_read(self, unit: Unit, flight: ShardReduction, output: torch.Tensor) -> None:
        if self._reads_at_once(unit, output):
            self._await(flight)

    @staticmethod
    def _reads_at_once(unit: Unit, output: torch.Tensor) -> bool:
        """Returns True if `fully_shard` reads the output before backward ends."""
        group = unit.group
        return (
            any(p.grad is not None for _, p in unit.trained())  # it adds the output to the gradient
            or output.dtype != group._orig_dtype  # it converts the output
            or isinstance(group.offload_policy, CPUOffloadPolicy)  # it copies the output
            or group._all_reduce_hook is not None
            or (group._is_hsdp and not group.all_reduce_grads)  # it stores the output
            or group._partial_reduce_output is not None
            or any(getattr(p, "_post_accumulate_grad_hooks", None) for p in unit.parameters)
        )

    def _check(self, unit: Unit, source: torch.Tensor) -> None:
        """Logs non-finite gradients; `source` has one row per rank, with one piece per
        parameter."""
        if source.sum().isfinite():
            return
        world = unit.group._reduce_scatter_process_group.size()
        trained = [one for one in unit.group.fsdp_params if one.sharded_param.requires_grad]
        sizes = [one.padded_sharded_param_size.numel() for one in trained]
        columns = source.view(world, -1).split(sizes, dim=1)
        bad = [
            unit.names[number - unit.first]
            for column, (number, _) in zip(columns, unit.trained(), strict=True)
            if not column.isfinite().all()
        ]
        _log.warning(
            "rank %d has gradients that are not finite: %s", dist.get_rank(), ", ".join(bad)
        )

    def _finish(self) -> None:
        """Ends a backward: reduces the mask, and waits for the units that are not deferred."""
        if self._failed is not None:
            raise self._failed
        defers = self._split is not None
        tail = MaskTail(self.leaving, self.sample_weights)
        mask = Mask(self._used, self._channels, FIRST if defers else 0, tail)
        self._used[:] = bytes(len(self._used))
        self.in_backward = False
        self.times.steps += 1
        self.times.reductions += self._issued
        for unit in self.units:
            flight = unit.flight
            if flight is None:
                continue
            flight.mask = mask
            parameters = [p for _, p in flight.trained]
            if defers and all(map(deferred.can_be, parameters)):
                deferred.defer(parameters, flight)
            else:
                self.arrive(unit)
        if not defers:
            self.leaving.learn()

    # Arrival

    def _await(self, flight: ShardReduction) -> None:
        begun = self.times.clock()
        flight.wait()
        self.times.exposed_s += self.times.clock() - begun

    def arrive(self, unit: Unit) -> None:
        """Waits for a unit's gradients, and steps them if the script has called `step()`.

        Does nothing during the backward that produces the gradients.
        """
        flight = unit.flight
        if flight is None or flight.mask is None:
            return
        with isolated_torch_state():
            begun = self.times.clock()
            try:
                flight.wait()
                reached = flight.mask.reached()
            except Exception:  # the group has failed; after an interrupt, the wait is repeated
                self._release(unit)
                self._torn = self._torn or flight.stepping
                raise
            self.times.exposed_s += self.times.clock() - begun
            self._release(unit)
            self._land(flight, reached)

    def _release(self, unit: Unit) -> None:
        """Makes the parameters of a unit ordinary again, because nothing of the unit is in
        flight."""
        assert unit.flight is not None
        deferred.restore(unit.flight.parameters)
        unit.flight = None

    def _land(self, flight: ShardReduction, reached: list[int]) -> None:
        """Hands out a unit's gradients after their arrival, and steps them if requested."""
        self._backlog.clear()  # backward has ended; this releases arrived reductions
        for (number, parameter), fresh in zip(flight.trained, flight.fresh, strict=True):
            if fresh and not reached[number]:
                parameter.grad = None
            if self.sample_weights is not None and parameter.grad is not None:
                self.sample_weights.correct(cast(DTensor, parameter.grad).to_local())
        if flight.stepping:
            assert self._split is not None
            self._split.step(flight.parameters)

    def settle(self) -> None:
        """Waits until no reduction is in flight."""
        for unit in self.units:
            self.arrive(unit)

    def stop(self) -> None:
        """Settles, and releases the optimizer."""
        self.settle()
        if self._split is not None:
            self._split.release()
            self._split = None

    def _in_flight(self) -> list[ShardReduction]:
        return [unit.flight for unit in self.units if unit.flight is not None]


def connect(unit: Unit, layout: DataLayout, sharding: Sharding, gather: Gather) -> None:
    """Replaces torch's communication of a unit by the communication of this package."""
    group, mesh = unit.group, unit.group.mesh_info
    group._all_gather_comm = gather
    group._reduce_scatter_comm = Scatter(functools.partial(sharding.scatter, unit))
    mesh.reduce_scatter_process_group = layout.reduce
    if layout.replicate is not None:
        mesh.replicate_process_group = Replication(
            layout.replicate, functools.partial(sharding.replicate, unit)
        )
    group.reduce_scatter_unused_params = not layout.alone
    if any(p.dtype not in (torch.float32, torch.bfloat16) for p in unit.parameters):
        group.gradient_divide_factor = unit.factor = 1.0  # else torch divides before and after


def refuse_unknown(module: nn.Module, units: Sequence[Unit]) -> None:
    """Raises ConfigError for a trained parameter that was added after wrapping: it is not
    sharded."""
    known = {
        id(p)
        for unit in units
        for one in unit.group.fsdp_params
        for p in (one.sharded_param, getattr(one, "_unsharded_param", None))
    }
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and id(parameter) not in known:
            raise ConfigError(
                f"{name} was added or replaced after wrapping: it is neither sharded nor reduced"
            )
