"""Private names of `torch.distributed.fsdp`, of its hooks in modules, and of its DTensors.

"Instead" names what this project plans to use if torch removes the entry. For most entries the plan
is the same: `haiscale.sharding` flattens, gathers and scatters parameters without `fully_shard`.
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
"""Class of a unit's parameters; its methods are wrapped to gather ahead and to watch gradients.

Instead: `haiscale.sharding`'s own units."""

TrainingState = _fsdp_common.TrainingState
"""State of a unit within a step. Instead: `haiscale.sharding`'s own units."""

local_to_dtensor = _fsdp_common._from_local_no_grad
"""Makes a DTensor of a local part and a spec. Instead: `DTensor.from_local` under `no_grad`."""

ORIGINAL_CLASS = FSDPModule._orig_cls_mro_index
"""Index in a sharded module's `__mro__` of the class that the module had before `fully_shard`.

Instead: keep that class."""

WrapPolicy = wrap._Policy
"""Base of the policies that choose units. Instead: its public subclasses."""

module_states = _composable_state._module_state_mapping
"""Map of modules to the state of `fully_shard`; to undo `fully_shard`, the module is removed.

Instead of this entry and the next two: modules built anew, loaded from their shards."""

FSDP_STATES = STATE_KEY
"""Key under which a module's `__dict__` holds the states of `fully_shard`."""

FSDP_REGISTRY = REGISTRY_KEY
"""Key under which a module's `__dict__` names the functions, like `fully_shard`, applied to it."""

clear_sharding_cache: Any = debug._clear_sharding_prop_cache
"""Clears DTensor's cache, which holds meshes of groups that have ended.

Instead: meshes that do not compare equal to former ones."""
