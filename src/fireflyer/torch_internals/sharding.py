"""Private names of `torch.distributed.fsdp`, of its hooks in modules, and of its DTensors.

"Instead" is the plan for an entry that torch removes. For most entries the plan is the same:
`haiscale.sharding` itself flattens, gathers and scatters parameters, instead of `fully_shard`.
"""

from typing import Any

from torch.distributed import _composable_state
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.fsdp import FSDPModule, wrap
from torch.distributed.fsdp._fully_shard import _fsdp_api, _fsdp_common, _fsdp_param_group
from torch.distributed.tensor import debug

AllGather = _fsdp_api.AllGather
"""Base of a unit's all-gather. Instead: duck typing, as `FSDPModule.set_custom_all_gather` allows."""

ReduceScatter = _fsdp_api.ReduceScatter
"""Base of a unit's reduce-scatter. Instead: duck typing, as for `AllGather`."""

FSDPParamGroup = _fsdp_param_group.FSDPParamGroup
"""Class of a unit's parameters, whose methods are wrapped to gather ahead and to watch gradients.

Instead: `haiscale.sharding`'s own units."""

TrainingState = _fsdp_common.TrainingState
"""State of a unit within a step. Instead: `haiscale.sharding`'s own units."""

local_to_dtensor = _fsdp_common._from_local_no_grad
"""Makes a DTensor of a local part and a spec. Instead: `DTensor.from_local` under `no_grad`."""

ORIGINAL_CLASS = FSDPModule._orig_cls_mro_index
"""Place of a module's class before `fully_shard` in its `__mro__`. Instead: keep the class."""

WrapPolicy = wrap._Policy
"""Base of the policies that choose units. Instead: its public subclasses."""

module_states = _composable_state._module_state_mapping
"""Map of modules to the state of `fully_shard`; undoing it removes a module from the map.

Instead of this entry and the next two: modules built anew, loaded from their shards."""

FSDP_STATES = STATE_KEY
"""Key in a module's `__dict__` of the states of `fully_shard`."""

FSDP_REGISTRY = REGISTRY_KEY
"""Key in a module's `__dict__` of the names of what was applied to it."""

clear_sharding_cache: Any = debug._clear_sharding_prop_cache
"""Clears DTensor's cache, which holds meshes of groups that have ended.

Instead: meshes that do not compare equal to former ones."""
