"""Waits in functions by which torch reads a tensor without calling its `__torch_function__`.

While parameters are pending (they wait for their gradients, see `deferred`), these functions are
replaced. A replacement first makes the pending parameters among its arguments arrive. Scripted code
may hold any parameter, so a call of scripted code makes all pending parameters arrive. Modules that
hold such a function under their own name (`from torch import tensor`) get the replacement, too.
"""

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import dlpack

from fireflyer.torch_internals import core, distributed

Call = Callable[..., Any]
Arrive = Callable[[Any], None]
"""Function that makes the pending parameters among its arguments arrive; None: all pending
parameters."""

Place = tuple[Any, str, Any, Any]
"""Owner of a function, its name, the owner's attribute (None: inherited), and the replacement."""

_READERS: tuple[tuple[Any, str], ...] = (
    *((torch, name) for name in ("tensor", "as_tensor", "asarray", "to_dlpack")),
    *((torch, f"sparse_{kind}_tensor") for kind in ("coo", "csr", "csc", "bsr", "bsc")),
    (torch, "sparse_compressed_tensor"),
    *((torch.Tensor, name) for name in ("new_tensor", "new", "set_", "as_subclass")),
    (nn.Parameter, "__new__"),
    *((torch.nested, name) for name in ("nested_tensor", "as_nested_tensor")),
    (dlpack, "to_dlpack"),
    *core.PRIVATE_READERS,
    *distributed.PRIVATE_READERS,
)
_COLLECTIVES = (
    *("allreduce", "reduce", "reduce_scatter", "_reduce_scatter_base", "broadcast"),
    *("allgather", "_allgather_base", "gather", "scatter", "alltoall", "alltoall_base"),
    *("send", "recv"),
)
_SCRIPTED: tuple[tuple[Any, str], ...] = (
    (core.ScriptMethod, "__call__"),
    (torch.jit.ScriptFunction, "__call__"),
)


class UnseenReads:
    """Replacements of these functions; `watch` and `end` may be called at any time, repeatedly."""

    def __init__(self, arrive: Arrive) -> None:
        self._arrive = arrive
        self._watched = False
        self._modules: set[str] = set()
        self._count = 0
        self._places: list[Place] = []

    def _find(self) -> Iterator[Place]:
        groups = tuple((dist.ProcessGroup, name) for name in _COLLECTIVES)
        for places, all_of_them in ((_READERS, False), (groups, False), (_SCRIPTED, True)):
            for owner, name in places:
                former = vars(owner).get(name)
                mine: Any = self._replacement(getattr(owner, name), all_of_them)
                if isinstance(former, staticmethod):
                    mine = staticmethod(mine)
                yield owner, name, former, mine

    def _find_imported(self, modules: Iterable[str]) -> Iterator[Place]:
        """Finds the functions under their names in other modules."""
        known = {
            id(former): mine
            for owner, _, former, mine in self._places
            if isinstance(owner, ModuleType)
        }
        for module in map(sys.modules.get, modules):
            if type(module) is not ModuleType:  # other kinds of modules may compute attributes
                continue
            for name, value in list(vars(module).items()):
                if id(value) in known and (module, name) not in _READERS:
                    yield module, name, value, known[id(value)]

    def _look(self) -> None:
        """Finds the functions, including those in modules imported since the last search."""
        self._places = self._places or list(self._find())
        fresh = sys.modules.keys() - self._modules
        self._modules |= fresh
        self._places += list(self._find_imported(fresh))

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
            if len(sys.modules) != self._count:
                self._count = len(sys.modules)
                self._look()
            for owner, name, _, mine in self._places:
                setattr(owner, name, mine)

    def end(self) -> None:
        """Restores the functions, except those that other code has since replaced."""
        if self._watched:
            self._watched = False
            for owner, name, original, mine in self._places:
                if vars(owner).get(name) is not mine:
                    continue
                if original is None:
                    delattr(owner, name)
                else:
                    setattr(owner, name, original)
