"""Data-parallel training: HFReduce averages gradients while backward and the next forward run.

PyTorch's DDP introduced buckets that are filled in backward order (Li et al., VLDB 2020).
ByteScheduler introduced communication that continues into the next forward, with the most urgent
tensors first (Peng et al., SOSP 2019). Design: docs/guide/haiscale.md.
"""

import copy
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from fireflyer import allocator, hfreduce
from fireflyer.deprecated import argument
from fireflyer.errors import ConfigError, ShardsLost
from fireflyer.haiscale.consistency import BufferCopy, check_alike, copy_from_first, described
from fireflyer.haiscale.copies import refuse_copy, second_name
from fireflyer.haiscale.elastic.state_transfer import share
from fireflyer.haiscale.gradients import deferred
from fireflyer.haiscale.gradients.bucket_plan import DEFAULT_BUCKET_BYTES
from fireflyer.haiscale.gradients.reducer import FIRST, Options, Reducer, let_go
from fireflyer.haiscale.gradients.split_optimizer import check_holds
from fireflyer.haiscale.gradients.suspend_vote import SuspendVote
from fireflyer.haiscale.reporting.facts import Facts, bytes_to_send, wire_bytes
from fireflyer.haiscale.reporting.times import Times
from fireflyer.haiscale.torch_interface import (
    DDP_ARGUMENTS,
    bucket_bytes_of,
    check_arguments,
)
from fireflyer.haiscale.validation import check_module, given
from fireflyer.haiscale.wrapper import ElasticOptions, Wrapper
from fireflyer.hfreduce import Wire
from fireflyer.hfreduce.backend.planned_hierarchy import PlannedHierarchy, Tree

_NOT_COPIED = ("reducer", "_buffer_copy", "_trained", "_times", "_optimizer")
_SHARED_BY_COPIES = ("_group", "_options", "_tree", "_leaving")


class DistributedDataParallel(Wrapper):
    """Replicates `module` over the ranks of a group and averages gradients.

    Without `optimizer` (synchronous), every parameter's `.grad` is the average over the ranks when
    `loss.backward()` returns. If a backward does not reach a parameter on some rank, that rank
    contributes zero. If no rank reaches it, its `grad` stays None.

    With `optimizer` (deferred), `backward` and `optimizer.step()` return before the gradients have
    arrived. The next use of a parameter (the next forward, `state_dict`, `print`) waits for its
    gradient and steps the parameter with the settings at the time of `optimizer.step()`. A read of
    `.grad` before `optimizer.step()` waits for the gradient, which can then be clipped. After
    `optimizer.step()` gradients are None.

    Args:
        module: module with float32, float64, bfloat16 or float16 parameters. Parameters and buffers
            are copied from the group's first rank.
        process_group: group of backend "hfreduce"; None means the default group.
        optimizer: an optimizer of `torch.optim`. Any other optimizer waits for all gradients in
            `optimizer.step()` and steps all parameters at once. If its attribute `separable` is
            True, it is used like one of `torch.optim` (see docs/guide/haiscale.md). Parameters that
            `optimizer` does not hold keep their averages for other optimizers.
        wire: format of gradients between hosts: "bf16", "fp16" or "int8" (see `hfreduce.Wire`);
            None means the gradients' own dtype.
        bucket_bytes: approximate size in bytes of the buckets in which gradients are reduced;
            default: 2 MiB. torch's `bucket_cap_mb` (MiB) sets it, too.
        broadcast_buffers: copy the first rank's buffers to all ranks before a forward, in training
            and in evaluation, if the previous forward ran with gradients (see docs/guide/haiscale.md).
        static_graph: every backward reaches the same parameters, so ranks need not exchange them.
        check_gradients: log the names of parameters whose local gradients are not finite.
        levels: reduce along this tree: nested lists of the group's ranks such as [[0, 1], [2, 3]]
            (see `hfreduce.planned.PlannedHierarchy`). Results then have the same bits regardless of
            the hosts on which the ranks run.
        elastic: continue without lost ranks, in the steps of `self.elastic`. Needs `optimizer`,
            which then steps synchronously.
        redivide, members_file: see `elastic.training.Elastic`.
        torchs: arguments of torch's DistributedDataParallel that have no effect here, such as
            `device_ids`.
        should_suspend: returns True if this rank was asked to leave, e.g. `hai.suspend_requested`.
            The function is called with each synchronised backward until a rank's call returns True.
            See `suspending`.

    Attributes:
        module: the wrapped module.
        reducer: `reducer.times` holds times spent waiting; `reducer.stop()` ends data parallelism.

    Raises:
        ConfigError: the group is not of the hfreduce backend; no parameter requires a gradient; a
            module makes sparse gradients or is a wrapper; the ranks' models or arguments differ;
            the optimizer cannot be split, has no parameter of the module or steps for another
            wrapper; `levels` is not a tree of all ranks, or is combined with `wire`. Raised by
            `forward` if the module was wrapped again.
        CollectiveError, RankFailed: a reduction failed; raised by `backward` or by the access that
            waits.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: ProcessGroup | None = None,
        *,
        optimizer: Optimizer | None = None,
        wire: str | None = None,
        bucket_bytes: int | None = None,
        broadcast_buffers: bool = True,
        static_graph: bool = False,
        check_gradients: bool = True,
        levels: Tree | None = None,
        elastic: bool = False,
        redivide: Callable[[int, int], object] | None = None,
        members_file: str | os.PathLike[str] | None = None,
        should_suspend: Callable[[], bool] | None = None,
        **torchs: object,
    ) -> None:
        super().__init__()
        members_file = argument(torchs, "doors", "members_file", members_file)
        check_arguments("DistributedDataParallel", DDP_ARGUMENTS, torchs)
        if isinstance(process_group, Optimizer | list | tuple):
            raise ConfigError("the second argument is process_group; pass optimizer=... by name")
        group = _checked(process_group or dist.group.WORLD)
        allocator.follow(os.environ)
        _check_module(module)
        if not isinstance(optimizer, Optimizer | None):
            raise ConfigError(
                f"invalid optimizer {given(optimizer)}: expected a torch optimizer of the module's "
                "parameters"
            )
        if optimizer is not None:
            check_holds(optimizer, module)
        elastics = ElasticOptions(elastic, redivide, members_file)
        elastics.check(optimizer)
        if elastic and levels is not None:
            raise ConfigError(
                "elastic=True and levels= exclude each other: a planned tree has fixed ranks"
            )
        bucket_bytes = bucket_bytes_of(bucket_bytes, torchs, DEFAULT_BUCKET_BYTES)
        Wire(wire or "fp32")  # raises ConfigError for an unknown codec
        self._leaving = SuspendVote(should_suspend)
        let_go(module.parameters())
        self.module = module
        self._group = group
        self._alike = {
            "optimizer": None if optimizer is None else type(optimizer).__name__,
            "wire": wire,
            "bucket_bytes": bucket_bytes,
            "broadcast_buffers": broadcast_buffers,
            "static_graph": static_graph,
            "levels": None if levels is None else "given",
            "elastic": elastic,
            "should_suspend": None if should_suspend is None else "given",
        }
        meets = not (elastic and group.joined)  # the members are in mid-training when a rank joins
        if meets:
            check_alike(module, group, self._alike)
        self._tree = None if levels is None else _planned(levels, group, wire)
        self._options = Options(bucket_bytes, wire, static_graph, check_gradients, self._tree)
        self._times = Times()
        self._optimizer = optimizer
        self._broadcast_buffers = broadcast_buffers
        self._at_once = any(map(deferred.reads_behind_python, module.modules()))
        self._elastic = None
        if elastic and optimizer is not None:
            self._elastic = elastics.controller(Replica(self, optimizer), optimizer, group)
        self._deferred = optimizer is not None and not elastic
        if meets:
            copy_from_first([*module.parameters(), *module.buffers()], group)
        self._wrap()

    def _wrap(self) -> None:
        named = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        self._trained = [p for _, p in named]
        sample_weights = self._elastic.sample_weights if self._elastic is not None else None
        self.reducer = Reducer(
            named, self._group, self._options, self._times, self._leaving, sample_weights
        )
        if self._deferred:
            assert self._optimizer is not None
            self.reducer.start_deferring(self._optimizer)
        first = FIRST if self._deferred else 0
        self._buffer_copy = BufferCopy(self.module, self._group, first)

    # Copies, like those of torch's wrapper

    def __copy__(self) -> Self:
        return second_name(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made = self.__new__(type(self))
        memo[id(self)] = made
        state = self._state_of_copy()
        shared = {name: state.pop(name) for name in _SHARED_BY_COPIES}
        made._begin_copy({**copy.deepcopy(state, memo), **shared})
        return made

    def __getstate__(self) -> dict[str, Any]:
        state = self._state_of_copy()
        if state.pop("_group") is not dist.group.WORLD or self._tree is not None:
            raise ConfigError(
                "a DistributedDataParallel with process_group= or levels= cannot be pickled: save "
                "state_dict() instead"
            )
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._begin_copy({**state, "_group": _checked(dist.group.WORLD)})

    def _state_of_copy(self) -> dict[str, Any]:
        if self._elastic is not None:
            refuse_copy(self)
        self.settle()
        state = {name: value for name, value in vars(self).items() if name not in _NOT_COPIED}
        state.update(_deferred=False, _alike={**self._alike, "optimizer": None})
        state["_leaving"] = self._leaving.should_suspend
        return state

    def _begin_copy(self, state: dict[str, Any]) -> None:
        """Begins data parallelism of a copy, which has its own reductions and no optimizer."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._leaving = SuspendVote(state["_leaving"])
        self._times, self._optimizer = Times(), None
        self._wrap()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_forward(self, compiles: bool) -> None:
        if torch.is_grad_enabled():
            self._follow_changes()
            self.reducer.before_forward()
        if self._at_once or compiles:
            self.reducer.settle()
        if self._broadcast_buffers:
            self._buffer_copy.before_forward(self.reducer.synchronise)

    @property
    def require_backward_grad_sync(self) -> bool:
        return self.reducer.synchronise

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, wanted: bool) -> None:
        self.reducer.synchronise = wanted

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads a state of this class, or of torch's wrapper, whose names begin with "module."."""
        own = set(self.module.state_dict())
        if not own.issuperset(state_dict) and all(key.startswith("module.") for key in state_dict):
            state_dict = {key.removeprefix("module."): value for key, value in state_dict.items()}
        return self.module.load_state_dict(state_dict, strict, assign)

    def settle(self) -> None:
        """Waits until every gradient has arrived and every requested step is done."""
        self.reducer.settle()

    def facts(self) -> Facts:
        """Returns the figures that `haiscale.report` needs; not collective."""
        wire = self._options.wire
        flats = [bucket.flat for bucket in self.reducer.buckets]
        travels = [flat.numel() * wire_bytes(flat.dtype, wire) for flat in flats]
        return Facts(
            times=self._times,
            sent=self._sent,
            rank=self._group.rank(),
            world=self._group.size(),
            hosts=self._group.hosts,
            deferred=self._deferred,
            sharded=False,
            parameter_bytes=sum(parameter.nbytes for parameter in self.parameters()),
            gradient_bytes=sum(flat.nbytes for flat in flats),
            must_send=2 * bytes_to_send(sum(travels), self._group),
            element_bytes=max(wire_bytes(flat.dtype, wire) for flat in flats),
            reductions=sum(len(bucket.pieces) for bucket in self.reducer.buckets),
        )

    def _sent(self) -> int:
        along_tree = self._tree.network_bytes_sent if self._tree is not None else 0
        return self._group.network_bytes_sent + along_tree

    def _follow_changes(self) -> None:
        """Adopts parameters that were added, frozen or thawed, provided all ranks changed alike."""
        now = [p for p in self.module.parameters() if p.requires_grad]
        if len(now) == len(self._trained) and all(map(_same, now, self._trained)):
            return
        self.reducer.stop()
        _check_module(self.module)
        check_alike(self.module, self._group)
        known = {id(p) for p in self._trained}
        copy_from_first([p for p in now if id(p) not in known], self._group)
        self._wrap()


def _checked(group: ProcessGroup | None) -> hfreduce.ProcessGroupHFReduce:
    if not isinstance(group, hfreduce.ProcessGroupHFReduce):
        raise ConfigError(
            "DistributedDataParallel needs a process group of backend 'hfreduce': "
            "init_process_group('hfreduce') or process_group=new_group(backend='hfreduce')"
        )
    return group


def _planned(levels: Tree, group: ProcessGroup, wire: str | None) -> PlannedHierarchy:
    if wire is not None:
        raise ConfigError(
            f"levels= and wire={wire!r} exclude each other: a planned tree does not encode gradients"
        )
    try:
        return PlannedHierarchy(levels, group)
    except ValueError as error:
        raise ConfigError(str(error)) from error


class Replica:
    """Wrapped model as an `elastic.training.Wrapper`: every rank holds the whole model."""

    def __init__(self, model: DistributedDataParallel, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._buffers: list[torch.Tensor] = []

    lost: ShardsLost | None = None  # every rank holds everything

    def described(self) -> list[str]:
        return described(self._model.module, self._model._alike)

    def drop(self) -> None:
        """Does nothing: all operations in flight belong to the group that is reformed."""

    def restored(self) -> None:
        """Does nothing: no values are ever lost."""

    def keep(self) -> None:
        self._drop_gradients()
        self._buffers = [buffer.detach().clone() for buffer in self._model.module.buffers()]

    def void(self) -> None:
        self._drop_gradients()
        _fill(self._model.module.buffers(), self._buffers)

    def align(self, progress: Sequence[int], leader: int) -> Callable[[], None]:
        module, group = self._model.module, self._model._group
        if min(progress) == progress[leader]:
            return lambda: None
        own = {"model": _tensors(module), "optimizer": self._optimizer.state_dict()}
        behind = progress[group.rank()] < progress[leader]
        state = share(own, leader, group, takes=behind)

        def put() -> None:
            _fill(_tensors(module), state["model"])
            self._optimizer.load_state_dict(state["optimizer"])

        return put if behind else lambda: None

    def reformed(self) -> None:
        self._drop_gradients()
        self._model._leaving.forget()
        self._model.reducer.abandon()
        known = self._model._trained
        self._model._wrap()
        self._model._trained = known  # the next forward repeats a change that some ranks missed

    def _drop_gradients(self) -> None:
        for parameter in self._model.module.parameters():
            parameter.grad = None


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _fill(tensors: Iterable[torch.Tensor], values: Iterable[torch.Tensor]) -> None:
    with torch.no_grad():
        for tensor, value in zip(tensors, values, strict=True):
            tensor.detach().copy_(value)


def _same(one: object, other: object) -> bool:
    return one is other


def _can_be_copied(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj():
        return False
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return not any(size > 1 and stride == 0 for size, stride in sizes)


def _check_module(module: nn.Module) -> None:
    """Raises ConfigError for a module that cannot be trained by data parallelism."""
    check_module(module, "DistributedDataParallel")
    for name, buffer in module.named_buffers():
        if not _can_be_copied(buffer):
            raise ConfigError(
                f"the buffer {name} is sparse, quantized, expanded or conjugated, so it has no bytes "
                "of its own to copy from the first rank: register its to_dense(), dequantize(), "
                "clone() or resolve_conj()"
            )
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    if not trained:
        raise ConfigError("DistributedDataParallel: no parameter requires a gradient")
    for name, parameter in trained:
        if nn.parameter.is_lazy(parameter):
            raise ConfigError(f"{name} has no shape yet: run a forward before wrapping")
        if parameter.is_meta:
            raise ConfigError(
                f"{name} is on the meta device: give the module memory and values first"
            )
        if not parameter.dtype.is_floating_point:
            raise ConfigError(
                f"{name} is {parameter.dtype}: only floating-point parameters can have gradients"
            )
