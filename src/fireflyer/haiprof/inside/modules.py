"""Root modules: those that the script calls itself, found while it runs, then timed by hooks of their
own.

A hook on every module would cost a microsecond or more a call. So `Module.__call__` is replaced for a
few steps only. It notes modules that are not called by another module. Those get hooks; then the
original comes back. Now and then it is replaced for one step, to find roots that came later.
"""

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from fireflyer.haiprof.events import FORWARD
from fireflyer.haiprof.inside.buffer import EventBuffer
from fireflyer.haiprof.inside.points import Replacement, keep_from_compiler

QUIET_STEPS = 2
"""Steps without a new root after which the search ends."""

SEARCH_EVERY = 64
"""Steps between later searches of one step."""


def nothing(*_: Any) -> None:
    """Stands for a hook in a module that was pickled during a session."""


class RootHook:
    """Hook at the beginning or end of a root's forward. Pickled, it becomes `nothing`."""

    def __init__(self, record: Callable[[], None], buffer: EventBuffer) -> None:
        self._record, self._buffer = record, buffer

    def __call__(self, *_: Any) -> None:
        if self._buffer.active:
            self._record()

    def __reduce__(self) -> str | tuple[Any, ...]:
        return nothing.__qualname__

    def __deepcopy__(self, memo: object) -> "RootHook":
        return self


class Root:
    """One root module and its hooks."""

    def __init__(self, module: Any, buffer: EventBuffer) -> None:
        self.module = weakref.ref(module)
        self._buffer = buffer
        name = type(getattr(module, "_orig_mod", module)).__name__
        self._record = buffer.recorder(FORWARD, buffer.label((FORWARD, id(module)), name))
        self._undo: list[Callable[[], None]] = []

    def put(self) -> None:
        """Puts the hooks in place."""
        module = self.module()
        if module is None or self._undo:
            return
        begin, end = self._record
        compiled = vars(module).get("_compiled_call_impl")
        if compiled is not None:  # hooks would be inside the compiled code
            self._undo = [Replacement(module, "_compiled_call_impl", self._around(compiled)).undo]
            return
        first = module.register_forward_pre_hook(RootHook(begin, self._buffer), prepend=True)
        last = module.register_forward_hook(RootHook(end, self._buffer), always_call=True)
        self._undo = [first.remove, last.remove]

    def _around(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        begin, end = self._record

        def hook(*args: Any, **kwargs: Any) -> Any:
            if not self._buffer.active:
                return compiled(*args, **kwargs)
            begin()
            try:
                return compiled(*args, **kwargs)
            finally:
                end()

        keep_from_compiler(hook)
        return hook

    def undo(self) -> None:
        """Removes the hooks."""
        undo, self._undo = self._undo, []
        for step in undo:
            step()


class RootModules:
    """The roots of one session."""

    def __init__(self, buffer: EventBuffer) -> None:
        self._buffer = buffer
        self._class: Any = sys.modules["torch.nn.modules.module"].Module
        self._compiling: Callable[[], bool] = sys.modules["torch"].compiler.is_compiling
        self._roots: dict[int, Root] = {}
        self._inside: set[int] = set()
        self._search: Replacement | None = None
        self._quiet = 0
        self._steps = 0
        self.found = 0
        """Roots found so far, also those that are gone."""
        self._start_search()

    @property
    def modules(self) -> list[Any]:
        """Returns the roots that are still alive."""
        return [m for root in self._roots.values() if (m := root.module()) is not None]

    def at_step(self) -> None:
        """Counts a step; starts and ends searches."""
        self._steps += 1
        self._quiet += 1
        if self._search is None:
            if self._steps % SEARCH_EVERY == 0:
                self._start_search()
                self._quiet = QUIET_STEPS - 1
        elif self._quiet >= QUIET_STEPS:
            self._end_search()

    def undo(self) -> None:
        """Removes all hooks."""
        self._end_search()
        for root in list(self._roots.values()):  # the training thread may add one
            root.undo()

    @contextmanager
    def unhooked(self) -> Iterator[None]:
        """Removes the hooks of modules for a while, so that a pickled module has none."""
        roots = list(self._roots.values())
        for root in roots:
            root.undo()
        try:
            yield
        finally:
            for root in roots:
                self._put(root)

    def _end_search(self) -> None:
        search, self._search = self._search, None
        if search is not None:
            search.undo()

    def _start_search(self) -> None:
        original = self._class.__call__
        compiling, inside, roots = self._compiling, self._inside, self._roots

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if compiling():
                return original(module, *args, **kwargs)
            ident = get_ident()
            if ident in inside or not self._buffer.active:
                return original(module, *args, **kwargs)
            known = roots.get(id(module))
            inside.add(ident)
            try:
                if known is not None and known.module() is module:
                    return original(module, *args, **kwargs)  # its own hooks record it
                return self._first_call(original, module, args, kwargs)
            finally:
                inside.discard(ident)

        keep_from_compiler(call)
        keep_from_compiler(RootModules._first_call)
        self._search = Replacement(self._class, "__call__", call)
        if not self._buffer.active:  # the agent has removed what it found, as in `_put`
            self._end_search()

    def _first_call(self, original: Any, module: Any, args: Any, kwargs: Any) -> Any:
        """Records the call of a new root, which gets its hooks afterwards."""
        label = self._buffer.label((FORWARD, id(module)), type(module).__name__)
        self._buffer.put(True, FORWARD, label)
        try:
            return original(module, *args, **kwargs)
        finally:
            self._buffer.put(False, FORWARD, label)
            if self._buffer.active:
                root = self._roots[id(module)] = Root(module, self._buffer)
                self._put(root)
                self.found += 1
                self._quiet = 0

    def _put(self, root: Root) -> None:
        """Puts a root's hooks in place, unless the session ends.

        The agent makes the buffer inactive before it removes hooks. What it may have missed, because
        this thread was putting it in place, is removed here.
        """
        if self._buffer.active:
            root.put()
        if not self._buffer.active:
            root.undo()
