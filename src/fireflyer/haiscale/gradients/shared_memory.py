"""Detection of tensors, arrays and processes that share a parameter's memory.

Code that holds such an alias reads the parameter without a torch function, so it would not see a
pending update (see `deferred`). Examples are a state dict or a view that was made before the loop,
`p.numpy()`, and shared memory.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fireflyer.torch_internals.core import DisableTorchFunctionSubclass, storage_uses

_LOCAL: Any = DTensor.__dict__["_local_tensor"]


def _memory(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Returns the memory of a tensor, without waiting for a pending parameter."""
    with DisableTorchFunctionSubclass():
        local: torch.Tensor = _LOCAL.__get__(tensor) if isinstance(tensor, DTensor) else tensor
        return torch.Tensor.untyped_storage(local)


def uses(tensor: torch.Tensor) -> int:
    """Returns the number of references to the memory of `tensor`, including the tensor's own."""
    count: int = storage_uses(_memory(tensor)._cdata)
    return count


ALONE = uses(torch.empty(1))
"""Number of references to the memory of a tensor that shares it with no other tensor."""


def is_shared(tensor: torch.Tensor, alone: int = ALONE) -> bool:
    """Returns True if other tensors, arrays or processes use the memory of `tensor`.

    Args:
        alone: number of references that are known to be harmless.
    """
    memory = _memory(tensor)
    return storage_uses(memory._cdata) > alone or (
        memory.device.type == "cpu" and memory.is_shared()
    )
