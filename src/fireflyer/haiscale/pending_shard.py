"""A sharded parameter that waits for its gradient; see `pending`.

Importing this makes `pending` know DTensors.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fireflyer.haiscale import pending

_LOCAL: Any = DTensor.__dict__["_local_tensor"]


class PendingShard(pending.Waits, DTensor):
    """Torch functions arrive through `Waits`; DTensor's own methods read `_local_tensor`."""

    __slots__ = ()

    @property
    def _local_tensor(self) -> torch.Tensor:
        pending.owner_of(self).arrive()
        local: torch.Tensor = _LOCAL.__get__(self)
        return local

    @_local_tensor.setter
    def _local_tensor(self, value: torch.Tensor) -> None:
        pending.owner_of(self).arrive()
        _LOCAL.__set__(self, value)


pending.CLASSES[DTensor] = PendingShard
