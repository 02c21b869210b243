"""Sharded data-parallel training: ranks divide parameters, gradients and optimizer state.

ZeRO's stages come from Rajbhandari et al. (SC 2020). torch's `fully_shard` does the sharding itself
(Zhao et al., VLDB 2023). Design: docs/guide/training/haiscale-fsdp.md.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecisionPolicy
from torch.optim import Optimizer

from fireflyer.deprecated import argument
from fireflyer.errors import CollectiveError, ConfigError, WireError
from fireflyer.haiscale.consistency import check_alike, copy_from_first
from fireflyer.haiscale.copies import Uncopied
from fireflyer.haiscale.elastic.sharded import Shards
from fireflyer.haiscale.gradients import deferred
from fireflyer.haiscale.gradients.split_optimizer import check_holds
from fireflyer.haiscale.gradients.suspend_vote import SuspendVote
from fireflyer.haiscale.mesh import (
    alone,
    checked,
    everyone_of,
    fits,
    hybrid_mesh,
    lay_out,
    lay_out_anew,
    shard_mesh,
)
from fireflyer.haiscale.reporting.facts import Facts
from fireflyer.haiscale.reporting.times import Times
from fireflyer.haiscale.sharding import full_state
from fireflyer.haiscale.sharding.communication import Channels, Gather, Label
from fireflyer.haiscale.sharding.costs import Wires, costs_of, sent_by
from fireflyer.haiscale.sharding.gradients import Sharding, Unit, connect, refuse_unknown
from fireflyer.haiscale.sharding.optimizer_state import Moments
from fireflyer.haiscale.sharding.prefetch import Prefetcher
from fireflyer.haiscale.sharding.reapply import ReshardedParameter, moved, put_on_blank, take_off
from fireflyer.haiscale.sharding.redistribute import Claim, Mover, Part, Plan
from fireflyer.haiscale.sharding.units import (
    AutoWrapPolicy,
    InitFunction,
    Settings,
    check_reshard,
    check_units,
    precision_of,
    shard,
    units_of,
)
from fireflyer.haiscale.torch_interface import FSDP_ARGUMENTS, check_arguments
from fireflyer.haiscale.validation import check_module
from fireflyer.haiscale.wrapper import ElasticOptions, Wrapper
from fireflyer.hfreduce import ProcessGroupHFReduce

__all__ = [
    "BackwardPrefetch",
    "FullyShardedDataParallel",
    "MixedPrecisionPolicy",
    "hybrid_mesh",
    "shard_mesh",
]

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]
SUMMONED = "summon_full_params is open"


@dataclass(frozen=True)
class Moved:
    """Result of `reshard`.

    Attributes:
        steps: number of steps that the values contain on all ranks.
        received: bytes that this rank received from other ranks.
    """

    steps: int
    received: int


class FullyShardedDataParallel(Uncopied, Wrapper):
    """Shards `module` over the ranks of a group; trains like one process with the global batch.

    Without `optimizer` (synchronous), make an optimizer on `parameters()` after wrapping. Every
    `.grad` is the average over the ranks, sharded like its parameter, when `loss.backward()`
    returns. If a backward does not reach a parameter on some rank, that rank contributes zero. If
    no rank reaches it, its `grad` stays None.

    With `optimizer` (deferred), `backward` and `self.optimizer.step()` return before the gradients
    have arrived. The next use of a unit's shards (the gather for the next forward, `state_dict`,
    `print`) waits for the gradients and steps the shards with the settings at the time of `step()`.
    A read of `.grad` before `step()` waits; after `step()` gradients are None.

    Args:
        module: module with parameters of floating types, on the CPU or the meta device; changed in
            place. Its units must run on all ranks or on none.
        process_group: group of backend "hfreduce"; None means the default group.
        optimizer: makes an optimizer from the sharded parameters, e.g. `partial(AdamW, lr=1e-3)`.
        auto_wrap_policy: choice of the parts that become units: a policy of
            `torch.distributed.fsdp.wrap` or a set of module classes. The rest is one unit. None:
            one unit.
        reshard_after_forward: True: gather parameters again for backward (ZeRO-3), except those of
            the outermost unit. False: keep them (ZeRO-2). A number: keep them sharded in that
            number of parts.
        mesh: (shard,) or (replicate, shard) instead of `process_group` (see `hybrid_mesh`), or a
            function that makes it (`mesh=hybrid_mesh`), which a joining rank does not call.
        backward_prefetch: in backward, gather the next unit before (BACKWARD_PRE) or after
            (BACKWARD_POST) the present unit's gradients are computed, or only in its turn (None).
        forward_prefetch: number of units to gather ahead of their turn in forward; True means one.
        mixed_precision: `param_dtype` is the type of gathered parameters and of computation. A
            narrower `reduce_dtype` is the type of gradients between hosts; their sums have the
            parameters' type.
        wire: format of gradients between hosts: "bf16", "fp16" or "int8"; overrides `reduce_dtype`.
        gather_dtype: type to which parameters are rounded in all-gathers; computation uses the
            parameters' own type.
        cpu_offload: True or `CPUOffload(True)`: keep shards on the CPU. On a CPU this only selects
            torch's offload code path.
        broadcast_from_first: copy the first rank's parameters and buffers to all before sharding.
        param_init_fn: sets the values of a module whose own parameters and buffers were on the meta
            device; default: `module.reset_parameters()`.
        check_gradients: log the names of parameters whose local gradients are not finite.
        backlog: maximum number of units whose unsharded gradients wait for the network.
        joins: this rank joins ranks that already train. Until all ranks call `reshard`, it does not
            communicate and needs no memory for values.
        elastic: continue without lost ranks, in the steps of `self.elastic`. Needs `optimizer`,
            which then steps synchronously. The mesh must contain all ranks of the default group
            (`process_group`).
        redivide, members_file: see `elastic.training.Elastic`.
        should_suspend, torchs: as for DistributedDataParallel; see `suspending`.

    Attributes:
        module: the sharded module.
        optimizer: the result of the `optimizer` argument, or None.
        times: times spent waiting.

    Raises:
        ConfigError: wrong backend of a group or mesh; no parameter requires a gradient; a parameter
            cannot be sharded or is shared between units; types differ within a unit; models or
            arguments differ between ranks; an optimizer cannot be split; a setting is invalid.
        CollectiveError, RankFailed: a collective failed; raised by `forward`, `backward` or a
            waiting access.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: ProcessGroup | None = None,
        *,
        optimizer: MakeOptimizer | None = None,
        auto_wrap_policy: AutoWrapPolicy | None = None,
        reshard_after_forward: bool | int = True,
        mesh: DeviceMesh | Callable[[], DeviceMesh] | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        forward_prefetch: int = 1,
        mixed_precision: MixedPrecisionPolicy | None = None,
        wire: str | None = None,
        gather_dtype: torch.dtype | None = None,
        cpu_offload: bool | CPUOffload = False,
        broadcast_from_first: bool = True,
        param_init_fn: InitFunction | None = None,
        check_gradients: bool = True,
        backlog: int = 4,
        joins: bool = False,
        elastic: bool = False,
        redivide: Callable[[int, int], object] | None = None,
        members_file: str | os.PathLike[str] | None = None,
        should_suspend: Callable[[], bool] | None = None,
        **torchs: object,
    ) -> None:
        super().__init__()
        check_arguments("FullyShardedDataParallel", FSDP_ARGUMENTS, torchs)
        members_file = argument(torchs, "doors", "members_file", members_file)
        elastics = ElasticOptions(elastic, redivide, members_file)
        elastics.check(optimizer)
        whole_group = checked(process_group or dist.group.WORLD) if elastic else None
        joins = joins or (whole_group is not None and whole_group.joined)
        if elastic and joins:
            mesh = process_group = None  # the members determine the layout
        check_module(module, type(self).__name__)
        self._settings = settings = Settings(
            reshard_after_forward=reshard_after_forward,
            backward_prefetch=backward_prefetch,
            forward_prefetch=forward_prefetch,
            mixed_precision=mixed_precision,
            wire=wire,
            gather_dtype=gather_dtype,
            cpu_offload=cpu_offload,
            param_init_fn=param_init_fn,
            backlog=backlog,
        )
        check_units(module, parts := units_of(module, auto_wrap_policy))
        trained = next(p for p in module.parameters() if p.requires_grad)
        wire = precision_of(mixed_precision, trained.dtype, wire)[1]
        self._wires = Wires(wire, gather_dtype)
        self.module, self.times = module, Times()
        self._at_once = any(map(deferred.reads_behind_python, module.modules()))
        self._parts = parts
        self._alike = {
            "units": [name for name, part in module.named_modules() if part in parts],
            "optimizer": None if optimizer is None else "given",
            "elastic": elastic,
            "should_suspend": None if should_suspend is None else "given",
            **settings.alike(),
        }
        self._part: Part | None = None
        self._wanted: int | None = None
        self._good, self._discarded = True, False
        if joins and (mesh is not None or process_group is not None):
            raise ConfigError("joins=True excludes other groups: pass the group to reshard()")
        if joins:
            self._layout = alone()
            self._ranks = _place_in(self._layout.gather)
            put_on_blank(parts, self._layout, settings, ())
        else:
            self._shard(mesh() if callable(mesh) else mesh, process_group, broadcast_from_first)
        self._units = _find_units(module, parts)
        self._channels = Channels(self._layout, wire)
        self._sharding = Sharding(self._units, self._channels, self.times, check_gradients, backlog)
        self._leaving = self._sharding.leaving = SuspendVote(should_suspend)
        self._connect()
        if joins:
            self._gatherer.closed = "this rank joins: call reshard() first"
        self._take_optimizer(optimizer, elastics, whole_group)

    def _shard(
        self, mesh: DeviceMesh | None, process_group: ProcessGroup | None, copies: bool
    ) -> None:
        """Lays out groups, compares models and arguments, and shards the values. Collective.

        Args:
            copies: copy the first rank's values to parameters and buffers that have values.
        """
        module, settings = self.module, self._settings
        self._layout = lay_out(mesh, process_group)
        check_reshard(settings.reshard_after_forward, self._layout.shards)
        self._wanted = self._layout.shards if self._layout.replicate is not None else None
        with everyone_of(self._layout) as everyone:
            self._ranks = _place_in(everyone)
            here = {
                "mesh": self._layout.mesh.mesh.tolist(),
                "broadcast_from_first": copies,
                "on the meta device": [n for n, p in module.named_parameters() if p.is_meta],
            }
            check_alike(module, everyone, {**self._alike, **here})
            if copies:
                copy_from_first(_present(module), everyone)
            shard(self._parts, self._layout.mesh, everyone, settings)
        self._part = Part.of(self._layout)

    def _take_optimizer(
        self,
        make: MakeOptimizer | None,
        elastics: ElasticOptions,
        group: ProcessGroupHFReduce | None,
    ) -> None:
        """Makes the optimizer for elastic steps, or for steps by unit if `group` is None."""
        self.optimizer = None if make is None else _made(make, self.module)
        self._elastic = None
        if self.optimizer is None:
            return
        if group is None:
            self._sharding.start_deferring(self.optimizer)
            return
        shards = Shards(self, self.optimizer, group)
        self._elastic = elastics.controller(shards, self.optimizer, group)
        self._sharding.sample_weights = self._elastic.sample_weights

    def _connect(self) -> None:
        for unit in self._units:
            gather = Gather(
                self.times, self._sharding.under_way, self._wires.parameters, unit.label
            )
            connect(unit, self._layout, self._sharding, gather)
        prefetch = (self._settings.forward_prefetch, self._settings.backward_prefetch)
        self._gatherer = Prefetcher(self.module, self._units, self._sharding, *prefetch)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_forward(self, compiles: bool) -> None:
        self._gatherer.check_open()
        if torch.is_grad_enabled():
            self._sharding.before_forward()
            refuse_unknown(self.module, self._units)
        if self._at_once or compiles:
            self._sharding.settle()

    @property
    def require_backward_grad_sync(self) -> bool:
        return all(unit.group.reduce_grads for unit in self._units)

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, wanted: bool) -> None:
        for unit in self._units:
            unit.group.reduce_grads = unit.group.all_reduce_grads = wanted

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales all gradients so that their common norm is at most `max_norm`. Collective.

        Returns:
            The norm before scaling, float64, equal on all ranks.
        """
        self.settle()
        return full_state.clip([*self.parameters()], self._layout, max_norm, norm_type)

    def settle(self) -> None:
        """Waits until every gradient has arrived and every requested step is done."""
        self._sharding.settle()

    def stop(self) -> None:
        """Settles, destroys the model's own groups, and restores the optimizer's own `step`.

        Values, `state_dict` and `reshard` remain usable. Garbage collection destroys groups, too.
        """
        self._sharding.stop()
        self._gatherer.closed = "stop() was called"
        self._channels.close()
        self._layout.give_back()

    def facts(self) -> Facts:
        """Returns the figures that `haiscale.report` needs; not collective."""
        rank, world, hosts = self._ranks
        costs = costs_of(self._units, self._layout, self._wires)
        return Facts(
            times=self.times,
            sent=lambda: sent_by(self._units, self._layout),
            rank=rank,
            world=world,
            hosts=hosts,
            deferred=self.optimizer is not None and self._elastic is None,
            sharded=True,
            parameter_bytes=costs.parameters,
            gradient_bytes=costs.gradients,
            must_send=costs.gathered + costs.reduced,
            must_gather=costs.gathered,
            element_bytes=costs.gradient_element,
            gathered_bytes=costs.parameter_element,
            reductions=len(self._units),
        )

    def discard(self) -> bool:
        """Drops a failed step: operations in flight and gradients. Waits for no other rank.

        Then call `reshard`; if the group must be reformed, reform it between the two calls.
        Operations in the layout's groups end with an error on all ranks, except in the default
        group.

        Returns:
            True if this rank's shards can be used. In deferred mode they may be mixed, because
            updates may have been in flight.
        """
        return self._discard(None)

    def _discard(self, kept: ProcessGroup | None) -> bool:
        self._gatherer.closed = "a step was discarded: call reshard() first"
        self._layout.end(kept)
        self._good = self._sharding.discard()
        self._discarded = True
        return self._good

    def reshard(
        self,
        process_group: ProcessGroup | None = None,
        *,
        shards: int | None = None,
        steps: int | None = 0,
        optimizers: Sequence[Optimizer] = (),
        values: bool = True,
    ) -> Moved:
        """Shards everything anew over the ranks of a group, from memory. Collective over the group.

        Every rank of the group that was in the old layout contributes its part; other ranks have no
        part (`joins`). Values come from the ranks with the most steps. The module, its sharded
        parameters and `optimizer` stay the same objects; gradients are dropped. After a failure
        every rank still has its values and can `reshard` with other ranks.

        Args:
            process_group: working group of backend "hfreduce", reformed if ranks were lost; None
                means the default group. Other code may use the group, too.
            shards: number of ranks of a host that share a copy; other ranks replicate it. Default:
                the previous number if it divides the number of ranks of each host, else one copy
                over all ranks.
            steps: number of steps that this rank has done; None if this rank's values cannot be
                used.
            optimizers: optimizers that the script made on the sharded parameters, the same on all
                ranks.
            values: False: move no values. Parameters are NaN and optimizers have no state until
                both are loaded from a checkpoint.

        Returns:
            The number of steps now done on all ranks, and the bytes received from other ranks.

        Raises:
            ShardsLost: no rank's memory holds some rows of a parameter; raised on all ranks.
                Nothing has changed.
            ConfigError: the ranks' models or optimizers differ, or `shards` does not fit.
            CollectiveError, RankFailed: a rank was lost meanwhile.
        """
        group = checked(process_group or dist.group.WORLD)
        self._check_reshard(group, shards)
        self._come_to_rest(group)
        check_alike(self.module, group, self._alike)
        names = {id(p): name for name, p in self.module.named_parameters()}
        moments = [Moments(one, names) for one in (self.optimizer, *optimizers) if one is not None]
        claim = Claim(
            self._part,
            steps if self._good and self._part is not None else None,
            shards or self._wanted,
            _digest(one.groups() for one in moments),
            _digest(one.structure() for one in moments),
            values,
        )
        plan = Plan.agree(claim, group)
        if values:
            plan.check({name: len(p) for name, p in self.module.named_parameters()})
        resharded = self._relayout(group, plan.wanted)
        mover = Mover(plan, group, self._layout)
        parts = moved(self.module, self._units, resharded, moments, mover, values)
        for parameter, part in parts:
            resharded[id(parameter)].fill(part)
        for one in moments:
            one.settle(self._layout.mesh)
        self._channels = Channels(self._layout, self._wires.gradients)
        self._sharding.take(self._units, self._channels)
        self._connect()
        self._part, self._good, self._discarded = Part.of(self._layout), True, False
        self._ranks = _place_in(group)
        return Moved(plan.newest, mover.received)

    def _check_reshard(self, group: ProcessGroup, shards: int | None) -> None:
        if self._gatherer.closed == SUMMONED:
            raise ConfigError(f"reshard: {SUMMONED}")
        if not isinstance(self._settings.reshard_after_forward, bool):
            raise ConfigError(
                f"reshard: reshard_after_forward={self._settings.reshard_after_forward} holds for one "
                "layout only: use True or False"
            )
        if shards is not None and not fits(group, shards):
            raise ConfigError(f"reshard: shards={shards} does not divide the ranks of each host")

    def _come_to_rest(self, group: ProcessGroup) -> None:
        """Ends operations in flight, frees gathered parameters and discards an unfinished step."""
        if not self._discarded and not self._sharding.half_way():
            try:
                self.settle()
            except (CollectiveError, WireError):
                self._discard(group)
        elif not self._discarded:
            self._discard(group)
        for unit in self._units:
            unit.group._to_sharded()

    def _relayout(self, group: ProcessGroup, wanted: int | None) -> dict[int, ReshardedParameter]:
        """Shards the module anew, while its parameters keep their old parts. Collective."""
        self._gatherer.closed = "reshard() has failed half way: call it again"
        self._channels.close()
        self._layout.give_up(group, self._discarded)
        self._discarded = True
        self._layout = lay_out_anew(group, wanted)
        self._wanted = wanted
        self._gatherer.release()
        kept = take_off(self._parts)
        resharded = put_on_blank(self._parts, self._layout, self._settings, kept)
        self._units = _find_units(self.module, self._parts)
        return resharded

    def state_dict(  # type: ignore[override]
        self, *args: Any, full: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        """Returns the state of `module`: DTensors, or whole tensors with `full` (collective)."""
        state = super().state_dict(*args, **kwargs)
        return full_state.whole(state) if full else state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads the result of `state_dict`: shards of the same layout, or whole tensors."""
        self.settle()
        parts = full_state.cut(state_dict, self.module.state_dict())
        return self.module.load_state_dict(parts, strict, assign)

    @contextlib.contextmanager
    def summon_full_params(
        self: nn.Module, module: nn.Module | None = None, *, writeback: bool = True
    ) -> Iterator[None]:
        """Makes all sharded modules show whole parameters within the context. Collective. No
        forward may run within the context.

        `FullyShardedDataParallel.summon_full_params(module)` does the same for any module.

        Args:
            module: a FullyShardedDataParallel, or a module with such parts. Default: this module.
            writeback: keep values that were written to the parameters; each rank keeps its part.
        """
        with contextlib.ExitStack() as stack:
            for part in (module or self).modules():
                if isinstance(part, FullyShardedDataParallel):
                    stack.enter_context(part._summoned(writeback))
            yield

    @contextlib.contextmanager
    def _summoned(self, writeback: bool) -> Iterator[None]:
        self.settle()
        self._gatherer.closed = SUMMONED
        try:
            with full_state.summoned(self._units, writeback):
                yield
        finally:
            self._gatherer.closed = ""


def _place_in(group: ProcessGroupHFReduce) -> tuple[int, int, tuple[tuple[int, ...], ...]]:
    """Returns rank, number of ranks, and hosts."""
    return group.rank(), group.size(), group.hosts


def _present(module: nn.Module) -> list[torch.Tensor]:
    return [t for t in (*module.parameters(), *module.buffers()) if not t.is_meta]


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def _find_units(module: nn.Module, parts: Sequence[Any]) -> list[Unit]:
    names = {id(p): name for name, p in module.named_parameters()}
    places = {id(part): name or "the rest" for name, part in module.named_modules()}
    labels: list[str] = []
    units: list[Unit] = []
    first = 0
    for part in parts:
        for group in part._get_fsdp_state()._fsdp_param_groups:
            own = [names[id(one.sharded_param)] for one in group.fsdp_params]
            labels.append(places[id(part)])
            units.append(Unit(group, first, own, Label(len(labels), labels)))
            first += len(own)
    return units


def _made(make: MakeOptimizer, module: nn.Module) -> Optimizer:
    if not callable(make) or isinstance(make, Optimizer):
        raise ConfigError(
            "invalid optimizer: expected a function that makes an optimizer of the sharded "
            "parameters, e.g. functools.partial(AdamW, lr=1e-3): wrapping replaces parameters"
        )
    made = make([*module.parameters()])
    if not isinstance(made, Optimizer):
        raise ConfigError(f"optimizer= returned a {type(made).__name__}, not a torch optimizer")
    check_holds(made, module)
    return made
