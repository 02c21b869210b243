"""Sharded data-parallel training: parameters, gradients and optimizer state lie in pieces on all ranks.

ZeRO's stages are Rajbhandari et al.'s (SC 2020); sharding itself is done by torch's `fully_shard` (Zhao et
al., VLDB 2023). Design: docs/haiscale-fsdp.md.
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
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecisionPolicy
from torch.optim import Optimizer

from fireflyer.errors import CollectiveError, ConfigError, WireError
from fireflyer.haiscale import pending, whole
from fireflyer.haiscale.agreement import check_alike, copy_from_first
from fireflyer.haiscale.elastic import Elastic
from fireflyer.haiscale.elastic_shards import Shards
from fireflyer.haiscale.facts import Facts
from fireflyer.haiscale.gathering import Gatherer
from fireflyer.haiscale.leaving import Leaving
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
from fireflyer.haiscale.moments import Moments
from fireflyer.haiscale.reducer import Times
from fireflyer.haiscale.refusals import check_module
from fireflyer.haiscale.resharding import Claim, Mover, Part, Plan
from fireflyer.haiscale.sharded_comm import Channels, Gather, Label
from fireflyer.haiscale.sharded_facts import Wires, costs_of, sent_by
from fireflyer.haiscale.sharding import Sharding, Unit, connect, refuse_unknown
from fireflyer.haiscale.stepping import check_holds
from fireflyer.haiscale.unsharding import Seat, moved, put_on_blank, take_off
from fireflyer.haiscale.wrapper import FSDP_ARGUMENTS, Wrapper, check_arguments
from fireflyer.haiscale.wrapping import (
    AutoWrapPolicy,
    InitFunction,
    Settings,
    check_reshard,
    check_settings,
    check_units,
    offloads,
    precision_of,
    shard,
    units_of,
)
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
    """What `reshard` did.

    Attributes:
        steps: that the values have seen, on all ranks.
        received: bytes that came to this rank from others.
    """

    steps: int
    received: int


class FullyShardedDataParallel(Wrapper):
    """Shards `module` over the ranks of a group; trains as one process with the global batch would.

    Without `optimizer`, make one on `parameters()` after wrapping; every `.grad` is the average over the
    ranks, sharded like its parameter, when `loss.backward()` returns. A parameter that a backward does not
    reach on some rank counts as zero there; one that no rank reached keeps `grad = None`.

    With `optimizer`, `backward` and `self.optimizer.step()` return before the gradients have arrived. The
    shards of a unit are waited for, and stepped with the settings that `step()` found, when they are next
    used: before they are gathered for the next forward, in a `state_dict`, by `print`. `.grad` can be read
    before `step()`, which waits for it; after it gradients are None.

    Args:
        module: parameters of floating types, on the CPU or the meta device; changed in place. Its units
            must run on all ranks or on none.
        process_group: of backend "hfreduce"; the default group when None.
        optimizer: makes the optimizer from the list of sharded parameters, e.g. `partial(AdamW, lr=1e-3)`.
        auto_wrap_policy: which parts become units of their own, by torch's policies
            (`torch.distributed.fsdp.wrap`), or a set of their classes; the rest is one unit. None: one unit
            for all.
        reshard_after_forward: True: parameters are gathered again for backward (ZeRO-3), but for those of the
            outermost unit. False: they are kept until then (ZeRO-2). A number: kept in so many parts.
        mesh: (shard,) or (replicate, shard) instead of `process_group`; see `hybrid_mesh`. Or a function
            that makes it (`mesh=hybrid_mesh`), which a rank that joins does not call.
        backward_prefetch: gather the next unit of backward before (BACKWARD_PRE) or after (BACKWARD_POST) the
            gradients of the present one are computed, or in its turn (None).
        forward_prefetch: how many units are gathered ahead of their turn in forward; True: one.
        mixed_precision: `param_dtype` is what parameters are gathered and computed as; a lower `reduce_dtype`
            is how gradients travel between hosts; they are summed in the parameters' type.
        wire: how gradients travel between hosts, before `reduce_dtype`: "bf16", "fp16" or "int8".
        gather_dtype: how parameters travel in all-gathers: rounded to this type, computed with in their own.
        cpu_offload: True or `CPUOffload(True)`: shards lie on the CPU. On a CPU they do so anyway; torch's
            code path is taken.
        broadcast_from_first: copy the first rank's parameters and buffers to all before sharding.
        param_init_fn: gives values to a module whose own parameters and buffers were on the meta device;
            default: `module.reset_parameters()`.
        check_gradients: log the names of parameters whose local gradients are not finite.
        backlog: at most so many units' unsharded gradients wait for the network.
        joins: this rank comes new to others that train already: without communication and without memory
            for values, until all call `reshard`.
        elastic: go on without ranks that are lost, in the steps of `self.elastic`; needs `optimizer`, which
            then steps as without it. The mesh must be of all ranks of the default group (`process_group`).
        redivide, doors: see `elastic.Elastic`.
        should_suspend, torchs: as DistributedDataParallel has them; see `suspending`.

    Attributes:
        module: the sharded module.
        optimizer: what `optimizer` made, or None.
        times: what was waited for.

    Raises:
        ConfigError: a group or mesh of another backend, nothing that requires a gradient, a parameter that
            cannot be sharded or is shared between units, types that differ within a unit, ranks with
            different models or arguments, an optimizer that cannot be cut in parts, or another setting.
        CollectiveError, RankFailed: a collective failed; raised by `forward`, `backward`, or whoever waits.
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
        doors: str | os.PathLike[str] | None = None,
        should_suspend: Callable[[], bool] | None = None,
        **torchs: object,
    ) -> None:
        super().__init__()
        check_arguments("FullyShardedDataParallel", FSDP_ARGUMENTS, torchs)
        whole_group = _elastic_group(process_group, optimizer) if elastic else None
        joins = joins or (whole_group is not None and whole_group.joined)
        if elastic and joins:
            mesh = process_group = None  # those who are there say how everything lies
        check_module(module, type(self).__name__)
        alike = check_settings(
            backlog=backlog,
            forward_prefetch=forward_prefetch,
            backward_prefetch=backward_prefetch,
            gather_dtype=gather_dtype,
            wire=wire,
            mixed_precision=mixed_precision,
        )
        check_units(module, parts := units_of(module, auto_wrap_policy))
        trained = next(p for p in module.parameters() if p.requires_grad)
        wire = precision_of(mixed_precision, trained.dtype, wire)[1]
        offload = offloads(cpu_offload)
        settings = Settings(reshard_after_forward, mixed_precision, offload, param_init_fn)
        self._wires = Wires(wire, gather_dtype)
        self.module = module
        self._at_once = any(map(pending.reads_behind_python, module.modules()))
        self.times = Times()
        self._parts, self._settings = parts, settings
        self._prefetch = (forward_prefetch, backward_prefetch)
        self._alike = {
            "units": [name for name, part in module.named_modules() if part in parts],
            "optimizer": None if optimizer is None else "given",
            "reshard_after_forward": reshard_after_forward,
            "cpu_offload": settings.cpu_offload,
            "elastic": elastic,
            "should_suspend": None if should_suspend is None else "given",
            **alike,
        }
        self._part: Part | None = None
        self._wanted: int | None = None
        self._good, self._discarded = True, False
        if joins and (mesh is not None or process_group is not None):
            raise ConfigError("joins=True: the group is told to reshard()")
        if joins:
            self._layout = alone()
            self._ranks = _place_in(self._layout.gather)
            put_on_blank(parts, self._layout, settings, ())
        else:
            self._shard(mesh() if callable(mesh) else mesh, process_group, broadcast_from_first)
        self._units = _find_units(module, parts)
        self._channels = Channels(self._layout, wire)
        self._sharding = Sharding(self._units, self._channels, self.times, check_gradients, backlog)
        self._sharding.leaving = Leaving(should_suspend)
        self._connect()
        if joins:
            self._gatherer.closed = "this rank joins: reshard() comes first"
        self._take_optimizer(optimizer, whole_group, redivide, doors)

    def _shard(
        self, mesh: DeviceMesh | None, process_group: ProcessGroup | None, copies: bool
    ) -> None:
        """Lays out groups, compares models and arguments, and cuts the module's values. Collective.

        Args:
            copies: what has values gets the first rank's.
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
        group: ProcessGroupHFReduce | None,
        redivide: Callable[[int, int], object] | None,
        doors: str | os.PathLike[str] | None,
    ) -> None:
        """Makes it, for elastic steps or to be stepped unit by unit. `group`: see `_made_elastic`."""
        self.optimizer = None if make is None else _made(make, self.module)
        self._elastic = self._made_elastic(group, redivide, doors)
        if self._elastic is not None:
            self._sharding.weighing = self._elastic.weighing
        elif self.optimizer is not None:
            self._sharding.cross(self.optimizer)

    def _made_elastic(
        self,
        group: ProcessGroupHFReduce | None,
        redivide: Callable[[int, int], object] | None,
        doors: str | os.PathLike[str] | None,
    ) -> Elastic | None:
        """`group`: None: the model is not elastic."""
        if group is None:
            if redivide is not None or doors is not None:
                raise ConfigError("redivide= and doors= are for elastic=True")
            return None
        assert self.optimizer is not None
        shards = Shards(self, self.optimizer, group)
        return Elastic(shards, self.optimizer, group, redivide=redivide, doors=doors)

    @property
    def elastic(self) -> Elastic:
        """The steps, where `elastic=True`.

        Raises:
            ConfigError: it is not.
        """
        if self._elastic is None:
            raise ConfigError("this model was wrapped without elastic=True")
        return self._elastic

    @property
    def suspending(self) -> bool:
        """Whether a rank was asked to leave, as `DistributedDataParallel.suspending`."""
        return self._sharding.leaving.suspending and (self._elastic is None or self._elastic.whole)

    def _connect(self) -> None:
        for unit in self._units:
            gather = Gather(
                self.times, self._sharding.under_way, self._wires.parameters, unit.label
            )
            connect(unit, self._layout, self._sharding, gather)
        self._gatherer = Gatherer(self.module, self._units, self._sharding, *self._prefetch)

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._before_forward(get_eval_frame_callback() not in (None, False))
        return self.module(*args, **kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_forward(self, compiles: bool) -> None:
        """`compiles`: what is called next is compiled, or runs compiled."""
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
            The norm before, float64, alike on all ranks.
        """
        self.settle()
        return whole.clip([*self.parameters()], self._layout, max_norm, norm_type)

    def settle(self) -> None:
        """Returns when every gradient has arrived and every step that was asked for is done."""
        self._sharding.settle()

    def stop(self) -> None:
        """Ends sharded training: settles, gives back the groups that were made for this model, and to the
        optimizer its own `step`. Values, `state_dict` and `reshard` remain. Groups are given back as well
        when the module is collected.
        """
        self._sharding.stop()
        self._gatherer.closed = "stop() was called"
        self._channels.close()
        self._layout.give_back()

    def facts(self) -> Facts:
        """What `haiscale.report` asks; not collective."""
        rank, world, hosts = self._ranks
        costs = costs_of(self._units, self._layout, self._wires)
        return Facts(
            times=self.times,
            sent=lambda: sent_by(self._units, self._layout),
            rank=rank,
            world=world,
            hosts=hosts,
            crosses=self.optimizer is not None and self._elastic is None,
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
        """Drops a step that failed: what is under way, and gradients. Waits for nobody. Then `reshard`; where
        the group is formed anew for that, afterwards.

        What runs in the groups of the layout ends with an error on all their ranks, but in the default group.

        Returns:
            Whether this rank's shards are good. When crossing, updates may have been under way.
        """
        return self._discard(None)

    def _discard(self, kept: ProcessGroup | None) -> bool:
        self._gatherer.closed = "a step was discarded: reshard() comes first"
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
        """Shards everything anew over the ranks of a group, from memory. Collective among them.

        Every rank of the old layout that is in the group brings its part; others have none (`joins`). Values
        come from the ranks with the most steps. The module, its sharded parameters, `optimizer` and whoever
        knows them stay the same objects; gradients are dropped. Where it fails, every rank still has what it
        had, and can `reshard` again with others.

        Args:
            process_group: of backend "hfreduce", and sound: where ranks were lost it has been formed anew;
                the default group when None. It may be used for other things besides.
            shards: so many ranks of a host share a copy that others replicate; default: as many as before,
                if each host has a multiple of it, else one copy for all.
            steps: how many this rank has done; None: what it holds is not good.
            optimizers: those that the script made on the sharded parameters, the same on all ranks.
            values: False: nothing is moved. Parameters are NaN and optimizers without state until they are
                loaded, from a checkpoint.

        Returns:
            How many steps are done now, on all ranks, and the bytes that came from others.

        Raises:
            ShardsLost: rows of a parameter are in no rank's memory; raised on all ranks. Nothing has changed.
            ConfigError: ranks with different models or optimizers, or `shards` that do not fit.
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
        seats = self._change_layout(group, plan.wanted)
        mover = Mover(plan, group, self._layout)
        parts = moved(self.module, self._units, seats, moments, mover, values)
        for parameter, part in parts:
            seats[id(parameter)].fill(part)
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
                f"reshard: reshard_after_forward={self._settings.reshard_after_forward} is for one layout "
                "only: use True or False"
            )
        if shards is not None and not fits(group, shards):
            raise ConfigError(f"reshard: shards={shards} does not divide the ranks of each host")

    def _come_to_rest(self, group: ProcessGroup) -> None:
        """Nothing is under way and nothing gathered; a step that is half done is discarded."""
        if not self._discarded and not self._sharding.half_way():
            try:
                self.settle()
            except (CollectiveError, WireError):
                self._discard(group)
        elif not self._discarded:
            self._discard(group)
        for unit in self._units:
            unit.group._to_sharded()

    def _change_layout(self, group: ProcessGroup, wanted: int | None) -> dict[int, Seat]:
        """The module is sharded anew, but its parameters still have their old parts. Collective."""
        self._gatherer.closed = "reshard() has failed half way: call it again"
        self._channels.close()
        self._layout.give_up(group, self._discarded)
        self._discarded = True
        self._layout = lay_out_anew(group, wanted)
        self._wanted = wanted
        self._gatherer.release()
        kept = take_off(self._parts)
        seats = put_on_blank(self._parts, self._layout, self._settings, kept)
        self._units = _find_units(self.module, self._parts)
        return seats

    def state_dict(  # type: ignore[override]
        self, *args: Any, full: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        """That of `module`: DTensors, or with `full` whole tensors on every rank, which is collective."""
        if args or kwargs.get("destination") is not None:  # a module around this one collects
            around: dict[str, Any] = super().state_dict(*args, **kwargs)
            return around
        state: dict[str, Any] = self.module.state_dict(**kwargs)
        return whole.whole(state) if full else state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Takes what `state_dict` gave, sharded alike, or whole tensors."""
        self.settle()
        parts = whole.cut(state_dict, self.module.state_dict())
        return self.module.load_state_dict(parts, strict, assign)

    @contextlib.contextmanager
    def summon_full_params(
        self: nn.Module, module: nn.Module | None = None, *, writeback: bool = True
    ) -> Iterator[None]:
        """Within, all sharded modules show whole parameters. Collective; no forward inside.

        Also `FullyShardedDataParallel.summon_full_params(module)`, for any module.

        Args:
            module: a FullyShardedDataParallel, or a module that has some. Default: this one.
            writeback: keep what is written to them: each rank keeps its part.
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
            with whole.summoned(self._units, writeback):
                yield
        finally:
            self._gatherer.closed = ""


def _place_in(
    group: ProcessGroupHFReduce,
) -> tuple[int, int, tuple[tuple[int, ...], ...]]:
    """Rank, number of ranks, hosts."""
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


def _elastic_group(
    process_group: ProcessGroup | None, optimizer: MakeOptimizer | None
) -> ProcessGroupHFReduce:
    """Of all ranks of an elastic model."""
    if optimizer is None:
        raise ConfigError("elastic=True needs the optimizer: optimizer=...")
    return checked(process_group or dist.group.WORLD)


def _made(make: MakeOptimizer, module: nn.Module) -> Optimizer:
    if not callable(make) or isinstance(make, Optimizer):
        raise ConfigError(
            "optimizer= takes a function from sharded parameters to an optimizer, e.g. "
            "functools.partial(AdamW, lr=1e-3): parameters are replaced by wrapping"
        )
    made = make([*module.parameters()])
    if not isinstance(made, Optimizer):
        raise ConfigError(f"optimizer= made a {type(made).__name__}, not a torch optimizer")
    check_holds(made, module)
    return made
