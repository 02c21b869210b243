"""Keeps torch.compile out of collectives, because a trace of Python cannot know a group's state.

A compiled model that calls a collective (DDP's forward broadcasts buffers) breaks its graph there,
as at a call into C++. The collective itself runs uncompiled.
"""

import inspect
from types import FunctionType
from typing import Any, TypeVar

from fireflyer.torch_internals.core import FrameAction, FrameExecStrategy, set_code_exec_strategy

Part = TypeVar("Part")

_SKIP_WITH_ALL_IT_CALLS = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)


def uncompiled(part: Part) -> Part:
    """Marks a function, or all methods of a class, as neither traced nor compiled by torch.compile.

    Calls have no added cost.
    """
    members: list[Any] = [part] if isinstance(part, FunctionType) else list(vars(part).values())
    for member in members:
        function: Any = member.fget if isinstance(member, property) else member
        function = inspect.unwrap(getattr(function, "__func__", function))
        if isinstance(function, FunctionType):
            function._torchdynamo_disable = True  # type: ignore[attr-defined]
            set_code_exec_strategy(function.__code__, _SKIP_WITH_ALL_IT_CALLS)
    return part
