"""When sharded gradients are waited for, and what happens then.

A unit is one group of parameters of `fully_shard`: one all-gather, one reduce-scatter. In a step:

    sharded --(its module's turn, or the one before's)--> gathered --(backward)--> reducing
    reducing --(classic: at the end of backward; crossing: when it is next used or looked at)--> arrived
    arrived --(crossing, and the script has called optimizer.step())--> stepped

Invariants: all ranks reduce the same units in the same order, then a mask of what any rank's backward
reached; all-gathers start in the order of use, whatever has arrived. During backward a rank waits only for
what each rank waits for in the same place, decided by what was started and never by what has arrived: rank 0
settles that the newest reduction is next, and another rank must not wait for an older one before it starts
that. The output of a reduction is not read before it has been waited for: `Sharding._reads_at_once` lists
when `fully_shard` itself would. Single-threaded, as `reducer` is.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor

from fireflyer import hfreduce
from fireflyer.errors import CollectiveError, ConfigError, WireError
from fireflyer.haiscale import pending, pending_shard
from fireflyer.haiscale.leaving import Leaving, Tail
from fireflyer.haiscale.mesh import DataLayout
from fireflyer.haiscale.reducer import FIRST, Times, UnderWay
from fireflyer.haiscale.resting import at_rest
from fireflyer.haiscale.sharded_comm import Channels, Gather, Label, Replication, Scatter
from fireflyer.haiscale.stepping import Settings, SplitOptimizer
from fireflyer.haiscale.weighing import Weighing
from fireflyer.log import get_logger

assert pending_shard.PendingShard in pending.CLASSES.values()
_log = get_logger("haiscale")


class Mask:
    """Which parameters the backward of any rank reached, under way."""

    def __init__(self, used: bytearray, channels: Channels, priority: int, tail: Tail) -> None:
        told = used + tail.write()
        self._parameters, self._tail = len(used), tail
        self._mask = hfreduce.empty(len(told), dtype=torch.uint8)
        self._mask.copy_(torch.frombuffer(told, dtype=torch.uint8))
        self._work: dist.Work | None = channels.most(self._mask, priority)
        self._reached: list[int] = []

    def reached(self) -> list[int]:
        """A number a parameter; waits."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            told = self._mask.numpy().tobytes()
            self._reached = list(told[: self._parameters])
            self._tail.read(told[self._parameters :])
        return self._reached


class Flight:
    """A reduction under way: what pending parameters know of it.

    Attributes:
        trained: when it took off, with their numbers; some may be frozen, and others thawed, since.
        fresh: of each trained parameter, whether it had no gradient before.
        mask: of the same backward, from its end on.
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
            self._work.wait()
        except CollectiveError as error:
            raise self._unit.label.named(error) from error.__cause__
        if self._away:
            self._away = False
            self._owner.under_way.end()

    def chain(self, begin: Callable[[dist.Work], dist.Work]) -> None:
        """Something else follows what is under way."""
        self._work = begin(self._work)


class Unit:
    """One group of parameters of `fully_shard`.

    Args:
        group: torch's `FSDPParamGroup`.
        first: number of its first parameter among those of all units.
        names: of its parameters.
        label: its own.
    """

    def __init__(self, group: Any, first: int, names: Sequence[str], label: Label) -> None:
        self.group, self.first, self.names, self.label = group, first, list(names), label
        self.flight: Flight | None = None
        self.watched: set[int] = set()
        self.factor: float | None = None  # by which `fully_shard` divides
        self._gathered: list[int] = []

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Sharded, whatever the module shows at the moment."""
        return [one.sharded_param for one in self.group.fsdp_params]

    def trained(self) -> list[tuple[int, nn.Parameter]]:
        """By their numbers among the parameters of all units."""
        return [(self.first + i, p) for i, p in enumerate(self.parameters) if p.requires_grad]

    def note_versions(self) -> None:
        self._gathered = self._versions()

    def is_stale(self) -> bool:
        """Whether the shards have changed since they were gathered."""
        return bool(self.group.is_unsharded) and self._gathered != self._versions()

    def _versions(self) -> list[int]:
        """A DTensor's version counts apart from its local part's."""
        both = [(one.sharded_param, one._sharded_local_tensor) for one in self.group.fsdp_params]
        return [tensor._version for pair in both for tensor in pair]


class Sharding:
    """Reduces the units' gradients and steps them.

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
        self.leaving = Leaving(None)
        """Told when all ranks have read the same masks, on which its byte rides."""
        self._check_gradients, self._limit = check_gradients, backlog
        self._split: SplitOptimizer | None = None
        self._settings: Settings = []
        self.weighing: Weighing | None = None
        """Of elastic training: gradients are means over samples."""
        self.take(units, channels)

    def cross(self, optimizer: torch.optim.Optimizer) -> None:
        """From now on units are waited for, and stepped, when they are next used or looked at."""
        self._split = SplitOptimizer(optimizer, self._close_step, self.settle)

    def take(self, units: Sequence[Unit], channels: Channels) -> None:
        """These are the units from now on; nothing of others is under way."""
        self.units = list(units)
        self.leaving.forget()
        self.under_way = UnderWay(self.times)
        self.in_backward = False
        self._channels = channels
        self._used = bytearray(sum(len(unit.names) for unit in units))
        self._issued = 0
        self._backlog: list[Flight] = []
        self._failed: Exception | None = None
        self._torn = False

    def half_way(self) -> bool:
        """Whether a forward or a backward has begun and not ended."""
        groups = [unit.group for unit in self.units]
        idle = all(
            group._training_state == TrainingState.IDLE and group._all_gather_result is None
            for group in groups
        )
        return self.in_backward or not idle

    def discard(self) -> bool:
        """Drops what is under way, gradients too, without waiting for it. To be called when the groups have
        ended; then `take`.

        Returns:
            Whether this rank's shards are those after a number of whole steps: no update was dropped.
        """
        for unit in self.units:
            flight, unit.flight = unit.flight, None
            pending.restore(unit.parameters)
            self._torn = self._torn or (flight is not None and flight.stepping)
            for parameter in unit.parameters:
                parameter.grad = None
        self._backlog.clear()
        self._channels.close()
        return not self._torn

    # Backward

    def watch(self, unit: Unit) -> None:
        """The unit's unsharded parameters are there: notes from now on what backward reaches."""
        for number, one in enumerate(unit.group.fsdp_params, unit.first):
            if number not in unit.watched and one._unsharded_param.requires_grad:
                unit.watched.add(number)
                one._unsharded_param.register_post_accumulate_grad_hook(self._reach(number))

    def _reach(self, number: int) -> Callable[[torch.Tensor], None]:
        used = self._used  # not self: collection sees no cycle through a tensor's hooks

        def reached(_: torch.Tensor) -> None:
            used[number] = 1

        return reached

    def before_forward(self) -> None:
        if self.in_backward and torch._C._current_graph_task_id() == -1:
            raise CollectiveError(
                "an earlier backward failed half way and the ranks may disagree: end this process group"
            )

    def _begin_backward(self) -> None:
        self.settle()
        self.leaving.learn()
        self._issued = 0
        self._backlog.clear()
        if self.weighing is not None:
            self.weighing.open()
        self.in_backward = True
        Variable._execution_engine.queue_callback(self._finish)

    def scatter(self, unit: Unit, output: torch.Tensor, source: torch.Tensor) -> None:
        """The unit's gradients are there; `fully_shard` goes on with `output` when this returns."""
        self._begin(unit)
        if self.weighing is not None:
            self.weighing.scale(source)
        if self._check_gradients:
            self._check(unit, source)
        group = unit.group
        work = self._channels.scatter(output, source, self._priority(), unit.label.number)
        flight = self._take_off(unit, work)
        if (
            not group._is_hsdp
            or not group.all_reduce_grads
            or group._partial_reduce_output is not None
        ):
            self._wait_if_read(unit, flight, output)

    def replicate(self, unit: Unit, shard: torch.Tensor) -> None:
        """The same for the sum over replicas, of what `scatter` has begun or of whole gradients.

        What fails here ends backward at its end: torch cannot log an exception of a group that it does not
        know, and would raise another in its place.
        """
        try:
            self._replicate(unit, shard)
        except (CollectiveError, WireError) as error:
            self._failed = self._failed or error

    def _replicate(self, unit: Unit, shard: torch.Tensor) -> None:
        if unit.group._reduce_scatter_process_group.size() == 1:
            self._begin(unit)
            if self.weighing is not None:
                self.weighing.scale(shard)
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
                "set_gradient_divide_factor: gradients are averages here, scale the loss"
            )
        if not self.in_backward:
            self._begin_backward()
        if self._issued >= self._limit:
            self._await(self._backlog[-1])
        self._issued += 1

    def _priority(self) -> int:
        return self._issued if self._split is not None else 0

    def _take_off(self, unit: Unit, work: dist.Work) -> Flight:
        if unit.flight is not None:  # of an earlier use of the same module
            self._await(unit.flight)
            fresh = unit.flight.fresh
        else:
            fresh = [p.grad is None for _, p in unit.trained()]
        flight = unit.flight = Flight(self, unit, work, fresh)
        for one in self._backlog:
            if one.over():
                one.wait()  # lets go of its memory
        self._backlog.append(flight)
        return flight

    def _wait_if_read(self, unit: Unit, flight: Flight, output: torch.Tensor) -> None:
        if self._reads_at_once(unit, output):
            self._await(flight)

    @staticmethod
    def _reads_at_once(unit: Unit, output: torch.Tensor) -> bool:
        """Whether `fully_shard` reads the output before backward ends."""
        group = unit.group
        return (
            any(p.grad is not None for _, p in unit.trained())  # adds it to what is there
            or output.dtype != group._orig_dtype  # converts it
            or isinstance(group.offload_policy, CPUOffloadPolicy)  # copies it
            or group._all_reduce_hook is not None
            or (group._is_hsdp and not group.all_reduce_grads)  # keeps it for a later sum
            or group._partial_reduce_output is not None
            or any(getattr(p, "_post_accumulate_grad_hooks", None) for p in unit.parameters)
        )

    def _check(self, unit: Unit, source: torch.Tensor) -> None:
        """`source`: rows of (a piece of each trained parameter, in order), one a rank."""
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
        """At the end of backward."""
        if self._failed is not None:
            raise self._failed
        crossing = self._split is not None
        tail = Tail(self.leaving, self.weighing)
        mask = Mask(self._used, self._channels, FIRST if crossing else 0, tail)
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
            if crossing and all(map(pending.can_be, parameters)):
                pending.defer(parameters, flight)
            else:
                self.arrive(unit)
        if not crossing:
            self.leaving.learn()

    # Arrival

    def _await(self, flight: Flight) -> None:
        begun = self.times.clock()
        flight.wait()
        self.times.exposed_s += self.times.clock() - begun

    def arrive(self, unit: Unit) -> None:
        """Waits for a unit's gradients, and steps them where the script already did. Not during the backward
        that makes them."""
        flight = unit.flight
        if flight is None or flight.mask is None:
            return
        with at_rest():
            self._land(unit, flight, flight.mask)

    def _land(self, unit: Unit, flight: Flight, mask: Mask) -> None:
        unit.flight = None
        trained = flight.trained
        pending.restore(p for _, p in trained)
        try:
            self._await(flight)
            begun = self.times.clock()
            reached = mask.reached()
        except BaseException:
            self._torn = self._torn or flight.stepping
            raise
        self._backlog.clear()  # backward is over; lets go of what has landed
        self.times.exposed_s += self.times.clock() - begun
        for (number, parameter), fresh in zip(trained, flight.fresh, strict=True):
            if fresh and not reached[number]:
                parameter.grad = None
            if self.weighing is not None and parameter.grad is not None:
                self.weighing.correct(cast(DTensor, parameter.grad).to_local())
        if flight.stepping:
            self._step([parameter for _, parameter in trained])

    def settle(self) -> None:
        """Nothing is under way any more."""
        for unit in self.units:
            self.arrive(unit)

    def stop(self) -> None:
        """Settles, and lets go of the optimizer."""
        self.settle()
        if self._split is not None:
            self._split.release()
            self._split = None

    def _close_step(self) -> None:
        """The script's `optimizer.step()`."""
        assert self._split is not None
        if any(unit.flight.stepping for unit in self.units if unit.flight is not None):
            self.settle()  # a step of its own was asked for before
        self._settings = self._split.settings()
        later = self._split.later([one.flight for one in self.units if one.flight is not None])
        self._step(self._split.others(p for flight in later for p in flight.parameters))
        for flight in later:
            flight.stepping = True

    def _step(self, parameters: Sequence[nn.Parameter]) -> None:
        self._apply(parameters)
        for parameter in parameters:
            parameter.grad = None

    def _apply(self, parameters: Sequence[nn.Parameter]) -> None:
        assert self._split is not None
        begun = self.times.clock()
        self._split.apply(parameters, self._settings)
        self.times.optimizer_s += self.times.clock() - begun


def connect(unit: Unit, layout: DataLayout, sharding: Sharding, gather: Gather) -> None:
    """Puts the communication of this package in the place of torch's."""
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
        group.gradient_divide_factor = unit.factor = 1.0  # else it divides before and after


def refuse_unknown(module: nn.Module, units: Sequence[Unit]) -> None:
    """Raises ConfigError for a parameter that is trained but not sharded: it was added after wrapping."""
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
