"""Functions by which torch reads a tensor without calling its `__torch_function__`.

While parameters are pending, these functions are replaced: each first makes the pending parameters
among its arguments arrive. Scripted code may hold any parameter, so all parameters arrive.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._functorch import eager_transforms
from torch._functorch import vmap as batching
from torch.utils import dlpack

Call = Callable[..., Any]
Arrive = Callable[[Any], None]
"""Makes the pending parameters among these arguments arrive; None: all pending parameters."""

_READERS: tuple[tuple[Any, str], ...] = (
    *((torch, name) for name in ("tensor", "as_tensor", "asarray", "to_dlpack")),
    *((torch, f"sparse_{kind}_tensor") for kind in ("coo", "csr", "csc", "bsr", "bsc")),
    (torch, "sparse_compressed_tensor"),
    *((torch.Tensor, name) for name in ("new_tensor", "new", "set_", "as_subclass")),
    *((torch.nested, name) for name in ("nested_tensor", "as_nested_tensor")),
    (dlpack, "to_dlpack"),
    (eager_transforms, "_wrap_for_grad"),
    (eager_transforms, "_wrap_functional_tensor"),
    (batching, "_add_batch_dim"),
    (dist, "_broadcast_coalesced"),
)
_COLLECTIVES = (
    *("allreduce", "reduce", "reduce_scatter", "_reduce_scatter_base", "broadcast"),
    *("allgather", "_allgather_base", "gather", "scatter", "alltoall", "alltoall_base"),
    *("send", "recv"),
)
_SCRIPTED: tuple[tuple[Any, str], ...] = (
    (torch._C.ScriptMethod, "__call__"),
    (torch.jit.ScriptFunction, "__call__"),
)


class UnseenReads:
    """Replacements of these functions; `watch` and `end` may be called at any time, repeatedly."""

    def __init__(self, arrive: Arrive) -> None:
        self._arrive = arrive
        self._watched = False

    @functools.cached_property
    def _places(self) -> list[tuple[Any, str, Any, Call]]:
        """Owner of each function, its name, the owner's attribute (None: inherited), replacement."""
        return list(self._find())

    def _find(self) -> Iterator[tuple[Any, str, Any, Call]]:
        groups = tuple((dist.ProcessGroup, name) for name in _COLLECTIVES)
        for places, all_of_them in ((_READERS, False), (groups, False), (_SCRIPTED, True)):
            for owner, name in places:
                mine = self._replacement(getattr(owner, name), all_of_them)
                yield owner, name, vars(owner).get(name), mine

    def _replacement(self, original: Call, all_of_them: bool) -> Call:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._arrive(None if all_of_them else (args, kwargs))
            return original(*args, **kwargs)

        return call

    def watch(self) -> None:
        """Replaces the functions."""
        if not self._watched:
            self._watched = True
            for owner, name, _, mine in self._places:
                setattr(owner, name, mine)

    def end(self) -> None:
        """Restores the functions, except those that other code has replaced since."""
        if self._watched:
            self._watched = False
            for owner, name, original, mine in self._places:
                if vars(owner).get(name) is not mine:
                    continue
                if original is None:
                    delattr(owner, name)
                else:
                    setattr(owner, name, original)
