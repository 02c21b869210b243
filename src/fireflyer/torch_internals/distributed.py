"""Private names of `torch.distributed`: process groups and their stores.

"Instead" names what this project plans to use if torch removes the entry.
"""

import torch.distributed as dist
from torch._C import _distributed_c10d as bindings

c10d = dist.distributed_c10d

ErrorType = bindings.ErrorType
"""Type of the result of `ProcessGroup.get_error`. Instead: the public name that torch gives it."""

AllgatherOptions = bindings.AllgatherOptions
"""Options of an all-gather, which torch passes to a process group. Instead: as for `ErrorType`."""

world = c10d._world
"""Torch's tables of process groups: `pg_map` (backend and store) and `pg_group_ranks`.

Instead: `dist.get_process_group_ranks`, and a store of our own per group."""

new_process_group = c10d._new_process_group_helper
"""Creates and registers a group of this process without asking ranks that died.

Instead: `ProcessGroupHFReduce` itself, entered into torch's tables."""

group_store = c10d._get_process_group_store
"""Returns a group's store. Instead: `ProcessGroupHFReduce` keeps the store that it was made with."""

default_store = c10d._get_default_store
"""Returns the default group's store. Instead: as for `group_store`."""

PRIVATE_READERS = ((dist, "_broadcast_coalesced"),)
"""As `core.PRIVATE_READERS`. Instead: nothing, if torch's DDP stops using it."""
