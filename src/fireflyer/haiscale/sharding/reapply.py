"""Removes `fully_shard` from a module in place, applies it again without values, sets values.

Parameters keep their old parts until `ReshardedParameter.fill` gives them new parts. So a change of
layout needs no whole parameter in memory.

Private members of torch's objects used here:
- the hooks whose handles `FSDPState`, `FSDPParamGroup` and `FSDPParam` keep;
- the places where a module keeps these objects (`FSDP_STATES`, `FSDP_REGISTRY`, `module_states`);
- the state of an unfinished step in these objects;
- a DTensor's `_local_tensor` and `_spec`, which define its placement.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fireflyer.haiscale.mesh import DataLayout
from fireflyer.haiscale.sharding.gradients import Unit
from fireflyer.haiscale.sharding.optimizer_state import Moments
from fireflyer.haiscale.sharding.redistribute import Mover, Piece
from fireflyer.haiscale.sharding.units import Settings, put_on
from fireflyer.torch_internals.sharding import (
    FSDP_REGISTRY,
    FSDP_STATES,
    ORIGINAL_CLASS,
    clear_sharding_cache,
    local_to_dtensor,
    module_states,
)

Slot = tuple[int, str]
"""Id of a module, and the name of a parameter in it."""


@dataclass(frozen=True)
class ReshardedParameter:
    """Sharded parameter in a new layout, without values until `fill`."""

    fsdp: Any
    parameter: nn.Parameter

    @property
    def rows(self) -> torch.Size:
        """Shape of this rank's part."""
        return cast(torch.Size, self.fsdp.sharded_size)

    def blank(self) -> torch.Tensor:
        """Returns uninitialised memory for this rank's part, zero-padded to the size of the largest
        part."""
        size, rows = self.fsdp.padded_sharded_param_size, self.rows
        padded = torch.empty(size, dtype=self.parameter.dtype)
        if self.fsdp.pin_memory:
            padded = padded.pin_memory()
        padded[rows[0] :].zero_()
        self.fsdp._sharded_param_data = padded.view(-1)
        return padded[: rows[0]]

    def fill(self, local: torch.Tensor) -> None:
        """Installs `local`, memory from `blank` that now contains values."""
        parameter = cast(Any, self.parameter)
        with torch.no_grad():
            parameter._local_tensor = local
        parameter._spec = self.fsdp._sharding_spec


def take_off(parts: Sequence[nn.Module]) -> set[int]:
    """Removes `fully_shard` from a module's units; only the sharded parameters stay.

    Drops the rest of an unfinished step; does not wait.

    Returns:
        The ids of the sharded parameters.
    """
    kept: set[int] = set()
    for part in parts:
        state = cast(Any, part)._get_fsdp_state()
        for group in state._fsdp_param_groups:
            _forget_step(group)
            group._to_sharded()
            for one in group.fsdp_params:
                one._setattr_on_modules(one.sharded_param)
                kept.add(id(one.sharded_param))
                one.sharded_param.grad = None
                one._sharded_param_data = one._sharded_param_data.new_empty(0)
        _remove_hooks(state)
        _forget_state(part, state)
    # The cache holds meshes that compare equal to the new mesh, but whose groups have ended.
    clear_sharding_cache()
    return kept


def _forget_step(group: Any) -> None:
    group._all_gather_result = group._partial_reduce_output = group._all_reduce_state = None
    group._reshard_after_forward_event = group._post_reduce_event = None
    group._post_forward_indices.clear()
    vars(group.comm_ctx).clear()  # releases whole gradients and gathered parameters
    for one in group.fsdp_params:
        one.unsharded_accumulated_grad = None
        if hasattr(one, "_unsharded_param"):
            one._unsharded_param.grad = None


def _remove_hooks(state: Any) -> None:
    handles = [state._pre_forward_hook_handle, state._post_forward_hook_handle]
    for group in state._fsdp_param_groups:
        handles += group._module_to_pre_save_state_dict_hook_handle.values()
        handles += group._module_to_pre_load_state_dict_hook_handle.values()
        handles += [one._post_load_hook_handle for one in group.fsdp_params]
    for handle in handles:
        handle.remove()


def _forget_state(part: nn.Module, state: Any) -> None:
    part.__class__ = type(part).__mro__[ORIGINAL_CLASS]
    del module_states[part]
    states = part.__dict__[FSDP_STATES]
    for key in [key for key, value in states.items() if value is state]:
        del states[key]
        part.__dict__[FSDP_REGISTRY].pop(key.__name__)


def put_on_blank(
    parts: Sequence[nn.Module],
    layout: DataLayout,
    settings: Settings,
    kept: Collection[int],
) -> dict[int, ReshardedParameter]:
    """Shards the units over the layout, without values and without communication.

    Args:
        kept: ids of the sharded parameters that stay the same objects; they come from a former
            layout. All other parameters are replaced.

    Returns:
        The resharded parameters by the id of each sharded parameter.
    """
    before: dict[Slot, nn.Parameter] = {}
    stand_ins: dict[int, nn.Parameter] = {}
    for module, name, parameter in _slots(parts[-1]):
        before[id(module), name] = parameter
        if id(parameter) not in stand_ins:
            meta = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            stand_ins[id(parameter)] = nn.Parameter(meta, parameter.requires_grad)
        module._parameters[name] = stand_ins[id(parameter)]
    resharded: dict[int, ReshardedParameter] = {}
    for part in parts:
        put_on(part, layout.mesh, settings, part is parts[-1])
        for group in cast(Any, part)._get_fsdp_state()._fsdp_param_groups:
            for one in group.fsdp_params:
                info = one._module_info
                former = before[id(info.module), info.param_name]
                place = _resharded(one, former if id(former) in kept else None)
                resharded[id(place.parameter)] = place
    return resharded


def _slots(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None:
                yield part, name, parameter


def _resharded(one: Any, former: nn.Parameter | None) -> ReshardedParameter:
    parameter = former
    if parameter is None:
        nothing = torch.empty((0, *one.sharded_size[1:]), dtype=one.sharded_param.dtype)
        made: DTensor = local_to_dtensor(nothing, one._sharding_spec)
        parameter = nn.Parameter(made, one.sharded_param.requires_grad)
    one.sharded_param = parameter
    one._setattr_on_modules(parameter)
    return ReshardedParameter(one, parameter)


def moved(
    module: nn.Module,
    units: Sequence[Unit],
    resharded: Mapping[int, ReshardedParameter],
    moments: Sequence[Moments],
    mover: Mover,
    values: bool,
) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """Returns this rank's new part of each parameter. Collective.

    Moves buffers and the optimizers' state, too. A rank with valid old values (`mover.behind` is
    False) modifies none of them. On the other ranks, the leader's buffers overwrite the rank's own
    buffers.
    """
    found = []
    for one in moments:
        one.learn(mover, values)
    for unit in units:
        own = [(p, resharded[id(p)].blank()) for p in unit.parameters]
        found += own
        if not values:
            for _, part in own:
                part.fill_(float("nan") if part.is_floating_point() else 0)
            continue
        mover.move([Piece(len(p), cast(Any, p)._local_tensor, part) for p, part in own])
        for one in moments:
            mover.move(one.pieces(unit.names, mover))
    _make_buffers(module)
    mover.spread([*module.buffers(), *(t for one in moments for t in one.others(mover))])
    return found


def _make_buffers(module: nn.Module) -> None:
    """Allocates memory for buffers on the meta device."""
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_meta:
                part._buffers[name] = torch.empty_like(buffer, device="cpu")
