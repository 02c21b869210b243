"""Divides a module into units, materialises meta-device parameters, and shards the units."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from fireflyer.errors import ConfigError
from fireflyer.haiscale.consistency import copy_from_first
from fireflyer.haiscale.validation import check_count, given
from fireflyer.hfreduce import Wire
from fireflyer.torch_internals.sharding import WrapPolicy

AutoWrapPolicy = WrapPolicy | Callable[..., bool] | Collection[type[nn.Module]]
InitFunction = Callable[[nn.Module], object]
WIRES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Settings:
    """Arguments of `FullyShardedDataParallel` that say how its units train.

    Raises:
        ConfigError: an argument has an invalid value.
    """

    reshard_after_forward: bool | int
    backward_prefetch: BackwardPrefetch | None
    forward_prefetch: int
    mixed_precision: MixedPrecisionPolicy | None
    wire: str | None
    gather_dtype: torch.dtype | None
    cpu_offload: bool | CPUOffload
    param_init_fn: InitFunction | None
    backlog: int

    def __post_init__(self) -> None:
        check_count("backlog", self.backlog, 1)
        check_count("forward_prefetch", self.forward_prefetch, 0)
        if not isinstance(self.backward_prefetch, BackwardPrefetch | None):
            raise ConfigError(
                f"invalid backward_prefetch {given(self.backward_prefetch)}: expected "
                "BackwardPrefetch.BACKWARD_PRE, BACKWARD_POST or None"
            )
        if self.gather_dtype not in (None, *WIRES):
            raise ConfigError(
                f"invalid gather_dtype '{self.gather_dtype}': expected one of "
                f"{', '.join(map(str, WIRES))}"
            )
        Wire(self.wire or "fp32")  # raises ConfigError for an unknown codec
        if not isinstance(self.mixed_precision, MixedPrecisionPolicy | None):
            raise ConfigError(
                f"invalid mixed_precision {given(self.mixed_precision)}: expected a "
                "torch.distributed.fsdp.MixedPrecisionPolicy, e.g. "
                "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32); "
                "buffers keep their types"
            )
        if not isinstance(self.cpu_offload, bool | CPUOffload):
            raise ConfigError(
                f"invalid cpu_offload {given(self.cpu_offload)}: expected True, False or CPUOffload"
            )

    @property
    def offloads(self) -> bool:
        """True if shards stay on the CPU."""
        offload = self.cpu_offload
        return offload.offload_params if isinstance(offload, CPUOffload) else offload

    def alike(self) -> dict[str, object]:
        """Returns the settings that must be equal on all ranks."""
        own = {name: value for name, value in vars(self).items() if name != "param_init_fn"}
        return {
            **own,
            "cpu_offload": self.offloads,
            "forward_prefetch": int(self.forward_prefetch),
        }


def check_reshard(reshard: object, shards: int) -> None:
    """Checks `reshard_after_forward` against the number of shards.

    Raises:
        ConfigError: `reshard_after_forward` is neither a bool nor a number that divides the shards.
    """
    if isinstance(reshard, bool):
        return
    if not isinstance(reshard, int) or reshard < 1 or shards % reshard:
        raise ConfigError(
            f"invalid reshard_after_forward {given(reshard)}: expected True, False or a number that "
            f"divides the {shards} shards"
        )


def units_of(module: nn.Module, policy: AutoWrapPolicy | None) -> list[nn.Module]:
    """Returns the modules that the policy chooses, inner ones first, and `module` itself last."""
    if policy is None:
        return [module]
    if isinstance(policy, set | frozenset | list | tuple) and all(map(_is_kind, policy)):
        policy = ModuleWrapPolicy(policy)
    if isinstance(policy, WrapPolicy):
        chosen = policy._run_policy(module, set(), {})
        if any(chosen.values()):
            raise ConfigError(
                "auto_wrap_policy gives arguments to single units, but all units get the same arguments"
            )
        inner = [part for part in _inner_first(module, set()) if part in chosen]
    else:
        if not callable(policy) or _is_kind(policy):
            raise ConfigError(
                f"invalid auto_wrap_policy {given(policy)}: expected a policy of "
                "torch.distributed.fsdp.wrap or a set of module classes"
            )
        inner, _ = _by_size(module, policy, set())
    return [part for part in inner if part is not module] + [module]


def _is_kind(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


def _inner_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    if module in seen:
        return
    seen.add(module)
    for child in module.children():
        yield from _inner_first(child, seen)
    yield module


def _by_size(
    module: nn.Module, policy: Callable[..., bool], seen: set[nn.Module], outermost: bool = True
) -> tuple[list[nn.Module], int]:
    """Applies a policy function as torch does, from the outermost module inwards.

    The first call of the policy for a module asks whether to look inside, and gets the number of
    all elements of the module. The second call asks whether the module becomes a unit, and gets
    the number of elements that are in no inner unit.

    Returns:
        The units in `module`, inner ones first, and the number of elements in these units. `module`
        is one of them if the policy chose it and it is not the outermost module.
    """
    elements = sum(p.numel() for p in module.parameters())
    if module in seen or not policy(module=module, recurse=True, nonwrapped_numel=elements):
        return [], 0
    seen.add(module)
    units: list[nn.Module] = []
    held = 0
    for child in module.children():
        below, within = _by_size(child, policy, seen, outermost=False)
        units += below
        held += within
    if outermost or not policy(module=module, recurse=False, nonwrapped_numel=elements - held):
        return units, held
    return [*units, module], elements


def check_units(module: nn.Module, units: Sequence[nn.Module]) -> None:
    """Raises ConfigError for units that cannot be trained; the error names their parameters."""
    if not any(p.requires_grad for p in module.parameters()):
        raise ConfigError("FullyShardedDataParallel: no parameter requires a gradient")
    names = {id(p): name for name, p in module.named_parameters()}
    for name, parameter in module.named_parameters():
        _check_parameter(name, parameter)
    places = {id(part): name or "the module" for name, part in module.named_modules()}
    owner: dict[int, nn.Module] = {}
    kinds: dict[int, nn.Parameter] = {}
    for unit, parameter in _owned(module, module, set(units), set()):
        first = owner.setdefault(id(parameter), unit)
        if first is not unit:
            raise ConfigError(
                f"{names[id(parameter)]} is shared by {places[id(first)]} and {places[id(unit)]}, which "
                "auto_wrap_policy puts in different units: leave one of them in the unit around both"
            )
        if not parameter.requires_grad:
            continue
        other = kinds.setdefault(id(unit), parameter)
        if other.dtype != parameter.dtype:
            raise ConfigError(
                f"{names[id(other)]} is {other.dtype}, but {names[id(parameter)]} of the same unit "
                f"({places[id(unit)]}) is {parameter.dtype}: the parameters of a unit need one dtype"
            )


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if nn.parameter.is_lazy(parameter):
        raise ConfigError(f"{name} has no shape yet: run a forward before wrapping")
    if parameter.ndim == 0:
        raise ConfigError(f"{name} is a scalar, which cannot be sharded: give it the shape (1,)")
    if not parameter.numel():
        raise ConfigError(f"{name} has no elements, so nothing can be sharded: leave it out")
    if not parameter.is_contiguous():
        raise ConfigError(f"{name} is not contiguous: wrap a contiguous copy")
    if parameter.requires_grad and not parameter.dtype.is_floating_point:
        raise ConfigError(
            f"{name} is {parameter.dtype}: only floating-point parameters can have gradients"
        )
    hooks = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
    if any(hooks):
        raise ConfigError(
            f"{name} has hooks on its gradient, which wrapping would lose with the parameter: call "
            "register_post_accumulate_grad_hook on the sharded one"
        )


def _owned(
    module: nn.Module, unit: nn.Module, units: set[nn.Module], seen: set[tuple[int, int]]
) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """Yields each parameter with its unit, once per occurrence."""
    unit = module if module in units else unit
    if (id(module), id(unit)) in seen:
        return
    seen.add((id(module), id(unit)))
    for parameter in module.parameters(recurse=False):
        yield unit, parameter
    for child in module.children():
        yield from _owned(child, unit, units, seen)


def precision_of(
    policy: MixedPrecisionPolicy | None, dtype: torch.dtype, wire: str | None
) -> tuple[MixedPrecisionPolicy, str | None]:
    """Returns the policy and the wire codec for gradients that are summed in memory as `dtype`.

    `dtype` is the parameters' type. If `wire` is None and `reduce_dtype` differs from `dtype`,
    `reduce_dtype` selects the wire codec.

    Raises:
        ConfigError: no wire codec has the type `reduce_dtype`.
    """
    policy = policy or MixedPrecisionPolicy()
    asked = policy.reduce_dtype or policy.param_dtype or dtype
    if wire is None and asked != dtype:
        if asked not in WIRES:
            raise ConfigError(f"gradients of {dtype} cannot be reduced as {asked}")
        wire = WIRES[asked]
    own = MixedPrecisionPolicy(
        policy.param_dtype, dtype, policy.output_dtype, policy.cast_forward_inputs
    )
    return own, wire


def shard(
    units: Sequence[nn.Module], mesh: DeviceMesh, everyone: ProcessGroup, settings: Settings
) -> None:
    """Shards unit by unit; whole values of at most one meta-device unit exist at a time. Collective."""
    root = units[-1]
    sharded: set[nn.Module] = set()
    for unit in units:
        inside = list(_inner_first(unit, set(sharded)))
        made = _materialise(inside, settings.param_init_fn)
        copy_from_first(made, everyone)
        _check_values(made, root)
        put_on(unit, mesh, settings, unit is root)
        sharded.update(unit.modules())


def put_on(unit: nn.Module, mesh: DeviceMesh, settings: Settings, outermost: bool) -> None:
    """Applies `fully_shard` to one unit, that is, to its parameters that are in no other unit yet."""
    reshard = settings.reshard_after_forward
    offload: OffloadPolicy = OffloadPolicy()
    if settings.offloads:
        offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    trained = [
        p for p in unit.parameters() if p.requires_grad and not isinstance(p, DTensor)
    ]  # sharded parameters already belong to a unit
    dtype = trained[0].dtype if trained else torch.float32
    fully_shard(
        unit,
        mesh=mesh,
        reshard_after_forward=None if outermost and reshard is True else reshard,
        mp_policy=precision_of(settings.mixed_precision, dtype, None)[0],
        offload_policy=offload,
    )


def _materialise(modules: Sequence[nn.Module], init: InitFunction | None) -> list[torch.Tensor]:
    """Gives memory and values to these modules' meta tensors, and returns the new tensors."""
    made: dict[torch.Tensor, torch.Tensor] = {}
    touched = []
    for module in modules:
        for slots in (module._parameters, module._buffers):
            table = cast(dict[str, torch.Tensor | None], slots)
            for name, tensor in table.items():
                if tensor is None or not tensor.is_meta:
                    continue
                table[name] = made.setdefault(tensor, _like(tensor))
                touched.append(module)
    for module in dict.fromkeys(touched):
        if init is not None:
            init(module)
        elif callable(reset := getattr(module, "reset_parameters", None)):
            reset()
        else:
            raise ConfigError(
                f"a {type(module).__name__} is on the meta device and has no reset_parameters(): "
                "pass param_init_fn"
            )
    return list(made.values())


def _check_values(made: Sequence[torch.Tensor], root: nn.Module) -> None:
    """Raises ConfigError for tensors without values. All ranks raise it, because their values are
    equal."""
    bare = {id(t) for t in made if (t.is_floating_point() or t.is_complex()) and t.isnan().any()}
    names = [n for n, t in (*root.named_parameters(), *root.named_buffers()) if id(t) in bare]
    if bare:
        raise ConfigError(
            f"{', '.join(names)}: on the meta device, and still without values (NaN) after param_init_fn or "
            "reset_parameters(): set values; use zeros if a checkpoint is loaded next"
        )


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a CPU tensor like `tensor`; NaN marks missing values if the type has NaN."""
    whole = torch.empty_like(tensor, device="cpu")
    if whole.is_floating_point() or whole.is_complex():
        whole.detach().fill_(float("nan"))
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(whole, tensor.requires_grad)
    return whole
