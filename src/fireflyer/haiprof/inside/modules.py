"""Root modules: modules that the script itself calls. They are found while the script runs, and
then timed by hooks of their classes.

A hook on every module would cost at least a microsecond a call. So `Module.__call__` is replaced
for a few steps only, to find modules that no other module calls. Their classes get hooks; then the
original `__call__` is restored. Later searches, of one step each, find roots that are called for
the first time.
"""

import sys
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any

from fireflyer._native.haiprof import timed
from fireflyer.haiprof.events import FORWARD
from fireflyer.haiprof.inside.buffer import EventBuffer
from fireflyer.haiprof.inside.points import Replacement, keep_from_compiler

QUIET_STEPS = 2
"""Number of steps without a new root after which a search ends."""

SEARCH_EVERY = 64
"""Number of steps between two later searches, which last one step each."""


def _owner(module: Any) -> Any:
    """Returns the object whose attribute `_compiled_call_impl` the hook of this root replaces.

    `Module.__call__` passes calls on to that attribute if there is one. The hook is an attribute of
    the class, so no instance, copy or pickle contains it. A module that was compiled in place has
    its own attribute, which is replaced instead.
    """
    return type(module) if vars(module).get("_compiled_call_impl") is None else module


class RootModules:
    """The roots of one session."""

    def __init__(self, buffer: EventBuffer) -> None:
        self._buffer = buffer
        self._class: Any = sys.modules["torch.nn.modules.module"].Module
        self._compiling: Callable[[], bool] = sys.modules["torch"].compiler.is_compiling
        self._roots: dict[int, weakref.ref[Any]] = {}
        self._hooks: dict[int, Replacement] = {}
        self._inside: set[int] = set()
        self._search: Replacement | None = None
        self._quiet = 0
        self._steps = 0
        self._next_search = 0
        self.found = 0
        """Roots found so far, including deleted modules."""
        self._start_search()

    @property
    def modules(self) -> list[Any]:
        """Returns the roots that are still alive."""
        return [module for root in self._roots.values() if (module := root()) is not None]

    def at_step(self, steps: int) -> int:
        """Counts steps; starts and ends searches. Returns the number of steps until the next
        call."""
        self._steps += steps
        self._quiet += steps
        if self._search is None:
            if self._steps >= self._next_search:
                self._start_search()
                self._quiet = QUIET_STEPS - 1
        elif self._quiet >= QUIET_STEPS:
            self._end_search()
            self._next_search = self._steps + SEARCH_EVERY - 1
        return 1 if self._search is not None else self._next_search - self._steps

    def undo(self) -> None:
        """Removes all hooks."""
        self._end_search()
        for hook in list(self._hooks.values()):  # the training thread may add a hook
            hook.undo()

    def _end_search(self) -> None:
        search, self._search = self._search, None
        if search is not None:
            search.undo()

    def _start_search(self) -> None:
        original = self._class.__call__
        # torch.compile must not trace a hook, so during a compilation the hook calls `followed`,
        # which leads to no hook.
        usual = original is self._class._wrapped_call_impl
        followed = self._class._call_impl if usual else original
        compiling, inside, roots = self._compiling, self._inside, self._roots
        log = self._buffer.log

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if compiling():
                return followed(module, *args, **kwargs)
            ident = get_ident()
            if ident in inside or not log.active:
                return original(module, *args, **kwargs)
            known = roots.get(id(module))
            inside.add(ident)
            try:
                if known is not None and known() is module:
                    return original(module, *args, **kwargs)  # the root's hook records the call
                return self._first_call(original, module, args, kwargs)
            finally:
                inside.discard(ident)

        keep_from_compiler(call)
        keep_from_compiler(RootModules._first_call)
        self._search = Replacement(self._class, "__call__", call)
        if not log.active:  # the agent has removed the hooks that it found; see `_put`
            self._end_search()

    def _first_call(self, original: Any, module: Any, args: Any, kwargs: Any) -> Any:
        """Records the call of a new root, and installs the hook of the root afterwards."""
        label = self._label(module)
        self._buffer.log.put(True, FORWARD, label)
        try:
            return original(module, *args, **kwargs)
        finally:
            self._buffer.log.put(False, FORWARD, label)
            if self._buffer.active:
                self._roots[id(module)] = weakref.ref(module)
                self._put(module)
                self.found += 1
                self._quiet = 0

    def _label(self, module: Any) -> int:
        name = type(getattr(module, "_orig_mod", module)).__name__
        return self._buffer.label((FORWARD, name), name)

    def _put(self, module: Any) -> None:
        """Installs the hook of a root, unless the root has one or the session ends. The agent
        deactivates the buffer before it removes hooks. If this thread installs a hook meanwhile,
        the agent may miss it; so this function removes that hook.
        """
        owner = _owner(module)
        if id(owner) in self._hooks:
            return
        function = vars(module)["_compiled_call_impl"] if owner is module else owner._call_impl
        hook = timed(self._buffer.log, function, FORWARD, self._label(module), outermost=True)
        try:
            placed = self._hooks[id(owner)] = Replacement(owner, "_compiled_call_impl", hook)
        except (AttributeError, TypeError):  # a class that takes no attributes
            return
        if not self._buffer.active:
            placed.undo()
