"""Sharded parameters that wait for their gradients; see `deferred`.

Importing this module registers DTensor with `deferred`.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fireflyer.haiscale.gradients import deferred

_LOCAL: Any = DTensor.__dict__["_local_tensor"]


class DeferredShard(deferred.DeferredMixin, DTensor):
    """Pending DTensor: torch functions wait in `DeferredMixin`, methods of DTensor wait in
    `_local_tensor`."""

    __slots__ = ()

    @property
    def _local_tensor(self) -> torch.Tensor:
        deferred.owner_of(self).arrive()
        local: torch.Tensor = _LOCAL.__get__(self)
        return local

    @_local_tensor.setter
    def _local_tensor(self, value: torch.Tensor) -> None:
        deferred.owner_of(self).arrive()
        _LOCAL.__set__(self, value)


deferred.CLASSES[DTensor] = DeferredShard
